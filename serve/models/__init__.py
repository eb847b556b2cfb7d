"""Models: the repository on disk, loading in a lane, probing, and the small zoo.

``repository`` and ``community`` need no torch and are for any process; everything else here
imports torch and belongs in a lane. Nothing is imported by this package on its own.
"""
