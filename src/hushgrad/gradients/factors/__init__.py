"""Per-sample gradients in factored form: kinds of factors, their norms and their sums."""
