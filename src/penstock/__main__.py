"""`python -m penstock` is `penstock`."""

from penstock.cli.main import run

if __name__ == "__main__":
    run()
