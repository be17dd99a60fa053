"""The only room that touches Accelerate and DeepSpeed: topology, building, updating, state."""
