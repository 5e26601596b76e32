# distutils: language = c++
# cython: language_level=3, binding=False, annotation_typing=False
# cython: boundscheck=True, wraparound=True, nonecheck=True, overflowcheck=True
"""Reads the JSON of most requests with binary tensors in one step, which `infer_request.py` can do without.

Theory of operation. A text that has anything but what a usual request has is left to the general reader, which then
reads all of it: values in JSON, memory of clients, classes, other members, escapes, letters beyond ASCII, numbers that
are not whole, members that come twice, and whatever is wrong. So nothing is refused here, and what is taken means the
same to both. The text is a stranger's: `Text` has its end, and no byte behind that is looked at.
"""

from cpython.bytes cimport PyBytes_AsString, PyBytes_FromStringAndSize, PyBytes_Size
from libc.string cimport memcmp

import sys


cdef extern from "sources.h" namespace "moonpool::python":
    int add_sources(object) except -1

cdef extern from *:
    # Of Python's limited API, where cpython.unicode has macros.
    object PyUnicode_DecodeUTF8(const char*, Py_ssize_t, const char*)

add_sources(sys.modules[__name__])

DEF MOST_BYTES = 2048
# So many digits fit into 64 bits.
DEF MOST_DIGITS = 18

cdef struct Text:
    const char* data
    Py_ssize_t at
    Py_ssize_t end


cdef struct Span:
    const char* begin
    Py_ssize_t size


cdef char peek(Text* text) noexcept:
    """Return the next byte that is no space, 0 at the end."""
    cdef char found
    while text.at < text.end:
        found = text.data[text.at]
        if found != c" " and found != c"\n" and found != c"\r" and found != c"\t":
            return found
        text.at += 1
    return 0


cdef bint take(Text* text, char what) noexcept:
    """Go behind a byte, if it is the next one."""
    if peek(text) != what:
        return False
    text.at += 1
    return True


cdef bint word(Text* text, const char* what, Py_ssize_t size) noexcept:
    """Go behind a literal."""
    peek(text)
    if text.end - text.at < size or memcmp(text.data + text.at, what, size):
        return False
    text.at += size
    return True


cdef bint string(Text* text, Span* span) noexcept:
    """Go behind a string of printable ASCII without escapes."""
    if not take(text, c'"'):
        return False
    cdef char found
    cdef Py_ssize_t begin = text.at
    while text.at < text.end:
        found = text.data[text.at]
        text.at += 1
        if found == c'"':
            span.begin = text.data + begin
            span.size = text.at - begin - 1
            return True
        if not 32 <= found < 127 or found == c"\\":
            return False
    return False


cdef bint whole(Text* text, long long* value) noexcept:
    """Go behind a number without a sign, a point or an exponent."""
    cdef char found
    cdef Py_ssize_t begin
    peek(text)
    begin = text.at
    value[0] = 0
    while text.at < text.end:
        found = text.data[text.at]
        if not c"0" <= found <= c"9":
            # If it goes on, as with a point, no separator is found there.
            return text.at > begin and (text.at - begin == 1 or text.data[begin] != c"0")
        if text.at - begin == MOST_DIGITS:
            return False
        value[0] = value[0] * 10 + (found - c"0")
        text.at += 1
    return False


cdef bint key(Text* text, Span* span) noexcept:
    """Go behind the name of a member."""
    return string(text, span) and take(text, c":")


cdef bint more(Text* text, char closing, bint* is_over) noexcept:
    """Go behind a comma, or behind the end of an object or array."""
    is_over[0] = take(text, closing)
    return is_over[0] or take(text, c",")


cdef bint named(Span* span, const char* name, Py_ssize_t size) noexcept:
    return span.size == size and memcmp(span.begin, name, size) == 0


cdef object text_of(Span* span):
    return PyUnicode_DecodeUTF8(span.begin, span.size, "strict")


cdef dict parameters_of(Text* text):
    """Read an object of texts, whole numbers and truth values; None for any other."""
    cdef dict found = {}
    cdef Span name, value
    cdef long long number
    cdef bint is_over = False
    cdef char first
    if not take(text, c"{"):
        return None
    if take(text, c"}"):
        return found
    while not is_over:
        if not key(text, &name):
            return None
        first = peek(text)
        given = text_of(&name)
        if given in found:
            return None
        if first == c'"':
            if not string(text, &value):
                return None
            found[given] = text_of(&value)
        elif first == c"t" or first == c"f":
            if word(text, "true", 4):
                found[given] = True
            elif word(text, "false", 5):
                found[given] = False
            else:
                return None
        else:
            if not whole(text, &number):
                return None
            found[given] = number
        if not more(text, c"}", &is_over):
            return None
    return found


cdef list shape_of(Text* text):
    cdef list shape = []
    cdef long long number
    cdef bint is_over = False
    if not take(text, c"["):
        return None
    if take(text, c"]"):
        return shape
    while not is_over:
        if not whole(text, &number) or not more(text, c"]", &is_over):
            return None
        shape.append(number)
    return shape


cdef bint size_of(Text* text, long long* size) noexcept:
    """Go behind an object that has the size of a binary tensor and nothing else."""
    cdef Span name
    return (
        take(text, c"{") and key(text, &name) and named(&name, "binary_data_size", 16) and whole(text, size)
        and take(text, c"}")
    )


cdef tuple input_of(Text* text, dict codes):
    """Read an input whose tensor comes in binary form: name, code, shape, no place, size, no values."""
    cdef Span member, value
    cdef long long size = -1
    cdef bint is_over = False
    cdef list shape = None
    cdef object name = None, code = None
    if not take(text, c"{"):
        return None
    while not is_over:
        if not key(text, &member):
            return None
        if name is None and named(&member, "name", 4):
            if not string(text, &value):
                return None
            name = text_of(&value)
        elif code is None and named(&member, "datatype", 8):
            if not string(text, &value):
                return None
            code = codes.get(text_of(&value))
            if code is None:
                return None
        elif shape is None and named(&member, "shape", 5):
            shape = shape_of(text)
            if shape is None:
                return None
        elif size < 0 and named(&member, "parameters", 10):
            if not size_of(text, &size):
                return None
        else:
            return None
        if not more(text, c"}", &is_over):
            return None
    if name is None or code is None or shape is None or size < 0:
        return None
    return (name, code, shape, None, size, None)


cdef bint output_in(Text* text, dict outputs) except -1:
    """Read an output that is wanted in binary form or as JSON."""
    cdef Span member, value
    cdef bint is_over = False, is_binary = False, has_form = False
    cdef object name = None
    if not take(text, c"{"):
        return False
    while not is_over:
        if not key(text, &member):
            return False
        if name is None and named(&member, "name", 4):
            if not string(text, &value):
                return False
            name = text_of(&value)
        elif not has_form and named(&member, "parameters", 10):
            has_form = True
            if not take(text, c"{") or not key(text, &value) or not named(&value, "binary_data", 11):
                return False
            is_binary = word(text, "true", 4)
            if not (is_binary or word(text, "false", 5)) or not take(text, c"}"):
                return False
        else:
            return False
        if not more(text, c"}", &is_over):
            return False
    if name is None or name in outputs:
        return False
    outputs[name] = is_binary
    return True


cdef class Scan:
    """Reads texts with these datatypes into plans of inputs of this type."""

    cdef object _plan, _new
    cdef dict _codes

    def __init__(self, plan, dict codes):
        self._plan = plan
        self._new = tuple.__new__
        self._codes = codes

    def __call__(self, bytes raw):
        """Return the id as a text and as it stands there, parameters, inputs, and the outputs that are named, each with
        True for binary form; None for a text of another form.
        """
        cdef Text text
        cdef Span member, value, id_span
        cdef bint is_over = False
        cdef dict parameters = None, outputs = None
        cdef list inputs = None
        cdef object name
        cdef Py_ssize_t size = PyBytes_Size(raw)
        if size > MOST_BYTES:
            return None
        text.data = PyBytes_AsString(raw)
        text.at, text.end = 0, size
        id_span.begin = NULL
        id_span.size = 0
        if not take(&text, c"{"):
            return None
        while not is_over:
            if not key(&text, &member):
                return None
            if inputs is None and named(&member, "inputs", 6):
                inputs = self._inputs(&text)
                if inputs is None:
                    return None
            elif outputs is None and named(&member, "outputs", 7):
                outputs = self._outputs(&text)
                if outputs is None:
                    return None
            elif parameters is None and named(&member, "parameters", 10):
                parameters = parameters_of(&text)
                if parameters is None:
                    return None
            elif id_span.begin == NULL and named(&member, "id", 2):
                if not string(&text, &id_span):
                    return None
            else:
                return None
            if not more(&text, c"}", &is_over):
                return None
        if inputs is None or peek(&text) or text.at < text.end:
            return None
        if parameters is None:
            parameters = {}
        if outputs is None:
            outputs = {}
        if id_span.size == 0:
            return "", b"", parameters, inputs, outputs
        written = PyBytes_FromStringAndSize(id_span.begin - 1, id_span.size + 2)
        return text_of(&id_span), written, parameters, inputs, outputs

    cdef list _inputs(self, Text* text):
        cdef list found = []
        cdef tuple plan
        cdef object other
        cdef bint is_over = False
        if not take(text, c"["):
            return None
        while not is_over:
            plan = input_of(text, self._codes)
            if plan is None or not more(text, c"]", &is_over):
                return None
            for other in found:
                if other[0] == plan[0]:
                    return None
            found.append(self._new(self._plan, plan))
        return found

    cdef dict _outputs(self, Text* text):
        cdef dict found = {}
        cdef bint is_over = False
        if not take(text, c"["):
            return None
        while not is_over:
            if not output_in(text, found) or not more(text, c"]", &is_over):
                return None
        return found


def scanner(plan, dict codes):
    """Return a reader of texts, for this type of plans of inputs and the codes of these datatypes."""
    return Scan(plan, codes)
