"""How ranks agree on what they do next, and how errors become the same on all of them."""
