"""``python -m zstrat``: runs the command line program ``zstrat``, for machines where
its script is not on the path."""

from zstrat.cli import main

if __name__ == "__main__":
    main()
