"""``python -m zstrat.cli``: the program without its script."""

from ._main import main

if __name__ == "__main__":
    main()
