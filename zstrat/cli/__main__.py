"""``python -m zstrat.cli``: runs the program without its installed script."""

from ._main import main

if __name__ == "__main__":
    main()
