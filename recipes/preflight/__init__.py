"""Every node looked at, and measured, before a run."""
