"""Asks any server of KServe v2 about nine hundred requests, and compares its answers with a tritonserver's.

    cases.py       all requests, each with the extension of the protocol that it is about
    http_*.py      the tables over HTTP        wire.py      sends them, byte by byte
    grpc_calls.py  the tables over gRPC        asking.py    asks a server, and waits for what takes time
    comparing.py   brings answers into a form without what must differ; expected.txt has a tritonserver's
    models/        the repository that the server has to serve
    report.py      what the comparison found
    openai.py      questions to any server of OpenAI's API, and the forms of that API's reference

The tests ask moonpool and, where there is one, a tritonserver.
"""
