"""`python -m hushgrad` is the command `hushgrad`."""

from hushgrad.cli import app

if __name__ == "__main__":
    app()
