"""How many processes train together; so far, one."""
