"""Self-contained HTML pages, with embedded images."""

import base64
import html

_STYLE = ("body{font-family:sans-serif;margin:2em;max-width:90em}img{max-width:100%}p{max-width:60em}"
          "pre{background:#f6f6f6;padding:1em;overflow-x:auto}")


def page(title: str, body: str) -> str:
    """Returns an HTML page.

    Args:
        title: str, plain text.
        body: str, HTML.
    """
    title = html.escape(title)
    return (f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>"
            f"<h1>{title}</h1>{body}</html>\n")


def image(text: str, png: bytes) -> str:
    """Returns the HTML of an embedded PNG image with an alternative text."""
    return f'<img alt="{html.escape(text)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'
