"""Plain text out of the files of a manual: bytes of any encoding, and HTML pages that point to the next one."""

import html.parser
import re

_BLOCKS = {"p", "div", "br", "tr", "table", "ul", "ol", "li", "dl", "dt", "dd", "hr", "blockquote",
           "h1", "h2", "h3", "h4", "h5", "h6", "pre", "section"}
_UNSEEN = {"head", "script", "style"}
_VOID = {"br", "hr", "img", "input", "link", "meta", "col", "area", "base", "wbr"}


def decoded(content):
    """Bytes as text: UTF-8, else Latin-1, which takes any. Lines end in \\n; no control characters but tab and \\n."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        text = content.decode("latin-1")
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\ufeff", "")
    text = re.sub(r"[\x00-\x08\x0b-\x1f\x7f\x80-\x9f]", "", text)
    return text.strip("\n") + "\n"


class _Page(html.parser.HTMLParser):
    """Collects the text of a page, without what stands in `skipped` classes (navigation)."""

    def __init__(self, skipped):
        super().__init__(convert_charrefs=True)
        self.skipped = skipped
        self.parts = []
        self.next_page = None
        self.unseen = []  # tags that are open within what is not taken, the outermost first
        self.preformatted = 0

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if tag == "link" and attrs.get("rel") == "next":
            self.next_page = attrs.get("href")
        if tag in _VOID:
            if tag in _BLOCKS and not self.unseen:
                self.parts.append("\n")
            return
        if self.unseen or tag in _UNSEEN or self.skipped & set((attrs.get("class") or "").split()):
            self.unseen.append(tag)
            return
        if tag in _BLOCKS:
            self.parts.append("\n\n" if tag in ("p", "pre") or tag[0] == "h" else "\n")
        if tag in ("td", "th") and not self.at_line_start():
            self.parts.append(" ")
        self.preformatted += tag == "pre"

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag):
        if self.unseen:
            if tag in self.unseen:
                while self.unseen.pop() != tag:
                    pass
            return
        if tag in _BLOCKS:
            self.parts.append("\n")
        self.preformatted -= tag == "pre"

    def handle_data(self, data):
        if self.unseen:
            return
        if not self.preformatted:
            data = re.sub(r"\s+", " ", data)
            if self.at_line_start():
                data = data.lstrip()
        if data:
            self.parts.append(data)

    def at_line_start(self):
        return not self.parts or self.parts[-1].endswith("\n")


def from_html(page, skipped=frozenset()):
    """(text of an HTML page, the file that its <link rel="next"> names or None). Elements of the classes `skipped` are
    left out."""
    parser = _Page(set(skipped))
    parser.feed(page)
    parser.close()
    text = "".join(parser.parts).replace("\xa0", " ")
    text = re.sub(r"[ \t]+\n", "\n", text)
    text = re.sub(r"\n{3,}", "\n\n", text)
    return text.strip("\n") + "\n", parser.next_page
