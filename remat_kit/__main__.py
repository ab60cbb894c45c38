"""`python -m remat_kit`, the same as the command `remat-kit`."""

from remat_kit._cli import main

if __name__ == "__main__":
    raise SystemExit(main())
