"""The papers' tables and figures, run anew, each with a table beside the paper's.

One file for each experiment, with one function of `StudySettings`, which `hushgrad reproduce` finds
by its name in pyproject.toml. Installed as `hushgrad_reproductions`, of which the library imports
nothing.
"""
