"""The papers' results, computed again: each leaves a table and a figure."""
