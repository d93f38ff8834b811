"""A training world that can change: the process group, the split of the data, the sum of the gradients."""
