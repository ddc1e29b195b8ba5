"""How a job is run, and how its output is written to a connection.

A Run has the job's generations. They become choices (`choices`), or the events of an answer that
is parsed (`parsed_output`), and these JSON (`paced_json`) or a stream (`sse`, `writers`).
"""
