"""One pass over a batch, in which every use of a private parameter is intercepted."""
