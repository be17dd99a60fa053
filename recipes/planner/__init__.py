"""The plan's arithmetic: what fits, how long, how much; shapes and machines in, figures out.

No torch here but in `tracing`, which loads it when it is called.
"""
