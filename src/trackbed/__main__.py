"""`python -m trackbed` is the command line."""

from trackbed.cli.main import main

if __name__ == "__main__":
    main()
