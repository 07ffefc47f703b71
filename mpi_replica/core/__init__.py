"""What all others speak of: pure, no communication."""
