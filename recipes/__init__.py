"""Training runs that can be repeated: one function for each, in one file for each data set."""
