"""Write the method table of the code into README.md (``make docs``)."""

from __future__ import annotations

from pathlib import Path

from forespeak.cli.methods import markdown

README = Path(__file__).parents[1] / "README.md"
END = "<!-- END METHODS -->"


def main() -> None:
    """Replace what stands between the two marks."""
    text = README.read_text(encoding="utf-8")
    start = text.index("\n", text.index("<!-- METHODS:")) + 1
    README.write_text(text[:start] + markdown() + text[text.index(END) :], encoding="utf-8")


if __name__ == "__main__":
    main()
