"""Reads forms, `multipart/form-data`, as clients send them with a file.

A reader of our own, because the form is one piece of memory when it gets here, and a form of this API has one file and
a few short fields: nothing has to be parsed while it comes, which is what the packages for forms are made for, and the
standard library's parser of e-mail copies a recording several times and mends what is malformed. This one refuses
what no client writes: it takes the boundary as it was announced, at most 16 parts, short heads, each name once, and
nothing before the first part or behind the last one. The file stays where it is.

It may run on any thread.
"""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import unquote

from moonpool.runtime.openai.fields import BadField
from moonpool.runtime.server.http.head import Body

_MOST_PARTS = 16
_MOST_HEAD_BYTES = 4 << 10
_MOST_TEXT_BYTES = 1 << 20
_TYPE = re.compile(
    r'multipart/form-data\s*;(?:.*;)?\s*boundary=(?:"([^"\\]{1,70})"|([^\s";,]{1,70}))\s*(?:;.*)?', re.IGNORECASE
)
_HEADER = re.compile(r"([!-9;-~]+):[ \t]*(.*?)[ \t]*")
_PARAMETER = re.compile(r';\s*([\w*-]+)=(?:"((?:[^"\\]|\\.)*)"|([^\s;"]*))')
_AS_IT_IS = ("binary", "8bit", "7bit")


class FormFile(NamedTuple):
    name: str
    """The name that the client gave for it; "" if it gave none."""
    content: memoryview


class Form(NamedTuple):
    """The fields of a form by name. A name that ends with `[]` has a list of texts, without these signs."""

    texts: dict[str, str | list[str]]
    files: dict[str, FormFile]


def read_form(content_type: str, body: Body) -> Form:
    """Return the fields of a form. Raises `BadField`."""
    found = _TYPE.fullmatch(content_type.strip())
    if found is None:
        raise BadField("the body must be a form, multipart/form-data with a boundary")
    separator = b"--" + (found[1] or found[2]).encode("latin-1")
    raw = body if isinstance(body, bytes) else bytes(body)
    form = Form({}, {})
    if not raw.startswith(separator):
        raise _malformed("it does not begin with its boundary")
    at = len(separator)
    for _ in range(_MOST_PARTS):
        at = _read_part(raw, at, separator, form)
        if raw[at : at + 2] == b"--":
            if raw[at + 2 :] not in (b"", b"\r\n"):
                raise _malformed("there is more behind the last part")
            return form
    raise _malformed(f"it has more than {_MOST_PARTS} parts")


def _read_part(raw: bytes, at: int, separator: bytes, form: Form) -> int:
    """Read the part behind the separator that ends at this place. Returns where the next separator ends."""
    head_end = raw.find(b"\r\n\r\n", at, at + _MOST_HEAD_BYTES)
    if raw[at : at + 2] != b"\r\n" or head_end < 0:
        raise _malformed(f"a part does not begin with a head of at most {_MOST_HEAD_BYTES} bytes")
    end = raw.find(b"\r\n" + separator, head_end + 4)
    if end < 0:
        raise _malformed("a part does not end with the boundary")
    name, filename = _named(raw[at + 2 : head_end])
    content = memoryview(raw)[head_end + 4 : end]
    if name in form.files or (name in form.texts and not name.endswith("[]")):
        raise BadField("the form has this field twice", (name,))
    if filename is not None:
        form.files[name] = FormFile(filename, content)
    else:
        _add_text(form.texts, name, content)
    return end + 2 + len(separator)


def _add_text(texts: dict[str, str | list[str]], name: str, content: memoryview) -> None:
    if len(content) > _MOST_TEXT_BYTES:
        raise BadField(f"a field of a form has at most {_MOST_TEXT_BYTES} bytes", (name,))
    try:
        text = str(content, "utf-8")
    except UnicodeDecodeError:
        raise BadField("must be a text in UTF-8", (name,)) from None
    key, is_list = name.removesuffix("[]"), name.endswith("[]")
    if not is_list:
        texts[key] = text
        return
    known = texts.setdefault(key, [])
    if not isinstance(known, list):
        raise BadField("the form has this field twice", (key,))
    known.append(text)


def _named(head: bytes) -> tuple[str, str | None]:
    """Return the name of a part, and that of its file if it is one."""
    headers: dict[str, str] = {}
    for line in head.decode("utf-8", "replace").split("\r\n"):
        found = _HEADER.fullmatch(line)
        if found is None or found[1].lower() in headers:
            raise _malformed("a part has a line that is not a header, or the same header twice")
        headers[found[1].lower()] = found[2]
    encoding = headers.get("content-transfer-encoding", "binary").lower()
    if encoding not in _AS_IT_IS:
        raise _malformed(f"a part has the encoding {encoding!r:.40}, and only 'binary' is read")
    disposition = headers.get("content-disposition", "")
    kind, semicolon, _ = disposition.partition(";")
    values = {
        key.lower(): re.sub(r'\\(["\\])', r"\1", quoted) if quoted else plain
        for key, quoted, plain in _PARAMETER.findall(semicolon and disposition[len(kind) :])
    }
    if kind.strip().lower() != "form-data" or not values.get("name"):
        raise _malformed("a part has no name")
    filename = values.get("filename")
    if filename is None and (extended := values.get("filename*")) is not None:
        filename = unquote(extended.rpartition("'")[2])
    return values["name"], filename


def _malformed(what: str) -> BadField:
    return BadField(f"malformed form: {what}")
