"""``python -m zstrat``: the program ``zstrat``, where its script is not on the path."""

from zstrat.cli import main

if __name__ == "__main__":
    main()
