"""What the tests of gradients share; the modules beside it can be imported from the folders below."""
