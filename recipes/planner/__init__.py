"""What fits, which strategy, how long, how much: answered before a GPU is rented. No torch here."""
