"""JSON and Python literals as language models write them: read strictly, read tolerantly, never evaluated.

    read_json('{"a": [1, 2]} and more')          # Literal({'a': [1, 2]}, end=13, notes=())
    read_tolerant("{'a': True,}").notes          # ('single quotes', 'Python literal True', 'trailing comma')
    read_python_call("f(x='a', t=(1, -2.5))")    # PythonCall(name='f', arguments={'x': 'a', 't': [1, -2.5]}, ...)

Every function raises only `LiteralError` (`repair_json` and `read_whole_json` raise nothing), takes time linear in the
text, nests no deeper than `MAX_DEPTH`, and returns values that `json.dumps(allow_nan=False)` accepts and UTF-8 can
encode.

A repair is made only if one meaning remains. Only an unescaped quote inside a string needs a second reading, in which a
quote ends its string only before text that may follow a string there. It fails if the text may be an expression
('a' + 'b') or may lack a comma, and it must reach the end of the given text.
"""
