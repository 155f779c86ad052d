"""Publishing: a commit becomes the version that serves. *files → load → gate → self-test → switch → drain → unload.*"""
