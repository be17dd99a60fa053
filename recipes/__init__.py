"""Accelerate + DeepSpeed recipes that pretrain a language model."""
