"""Lab 01, checkpointing: what its checks play (`scenes`, `groups`) and how they judge it (`checks`)."""
