"""``zbcompile selftest``: what a machine, and above all its GPU, makes of the runtime, in one report.

Needs torch alone: models are plain torch, orders are files (`plans`), so neither the planner's solver nor
transformers is imported. Each section runs in processes of its own.
"""
