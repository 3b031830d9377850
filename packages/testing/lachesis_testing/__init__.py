"""Servers and suites for tests, of users too. Import them from their modules:

* `fake_server.FakeServer`: the HTTP APIs of vLLM, SGLang, OpenAI and Atropos, with a real tokenizer and no model
* `scripted_server.ScriptedServer`: OpenAI's chat route that plays messages, with `say` and `call`
* `reference_server.ReferenceServer`: OpenAI's chat route that answers with a Python function
* `worked_solutions`: a policy that plays worked solutions of maths problems
* `parser_suite.ParserSuite`: the conformance suite of tool-call parsers, with `Case` and `Limits`
* `engine_suite.EngineSuite`: the conformance suite of token engines
* `backend_suite`: the conformance suite of sandbox backends (`from lachesis_testing.backend_suite import *`)
* `export_suite.ExportSuite`: the conformance suite of exports
"""
