"""Documents in, one global order of token sequences out, for any number of ranks and workers."""
