"""`place`, `where`, `meshes`, `devices`: put arrays on devices, and report their location."""
