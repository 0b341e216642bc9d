"""``python -m neula``: the command line."""

from neula.cli.main import main

if __name__ == "__main__":
    main()
