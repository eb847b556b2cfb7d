"""Draw the pictures of docs/.

python -m docs.drawings
"""

from bench.kit.result import DOCS_PATH, read_result
from docs.drawings.estimates import estimates_picture, traced
from docs.drawings.gnnsched import gnnsched_picture
from docs.drawings.policies import policies_picture
from docs.drawings.schedules import PICTURES, picture


def main() -> None:
    """Write all drawings."""
    drawn = {name: picture(panels) for name, panels in PICTURES.items()}
    drawn["policies.svg"] = policies_picture(read_result("policies"))
    drawn["estimates.svg"] = estimates_picture(*traced())
    drawn["gnnsched.svg"] = gnnsched_picture(read_result("gnnsched"))
    for name, svg in drawn.items():
        (DOCS_PATH / name).write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
