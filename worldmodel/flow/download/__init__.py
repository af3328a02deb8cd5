"""Reading of files by their address, over http(s) and from storages; addresses are not trusted."""
