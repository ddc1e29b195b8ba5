"""Runs a job, and writes its output to a connection.

A Run has the job's generations. They become choices (`choices`), or events if the output is parsed
(`parsed_output`). These are written as JSON (`paced_json`) or as a stream (`sse`, `writers`).
"""
