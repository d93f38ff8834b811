"""Training state: what must survive together, and how it is taken apart, checked and put back."""
