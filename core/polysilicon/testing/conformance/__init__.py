"""The conformance kit: what every backend must pass. Run it with

pytest --pyargs polysilicon.testing.conformance --polysilicon-backend NAME
"""
