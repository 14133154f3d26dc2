"""Pages of one file, with their pictures inside."""

import base64
import html

_STYLE = ("body{font-family:sans-serif;margin:2em;max-width:90em}img{max-width:100%}p{max-width:60em}"
          "pre{background:#f6f6f6;padding:1em;overflow-x:auto}")


def page(title: str, body: str) -> str:
    """HTML of a title, which is plain text, and a body, which is HTML."""
    title = html.escape(title)
    return (f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>"
            f"<h1>{title}</h1>{body}</html>\n")


def image(text: str, png: bytes) -> str:
    """HTML of a picture, and the plain text in its place for who does not see it."""
    return f'<img alt="{html.escape(text)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'
