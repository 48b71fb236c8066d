"""`python -m remtta` is the same as `remtta`."""

from remtta.cli import main

if __name__ == "__main__":
    main()
