"""Stage 3, the router of chat requests: what every worker has cached, and which one a request is worth giving to.

``prompt_hashes`` names the blocks of a prompt as workers name them in KvEvents; ``prefix_index`` knows which worker
holds which block; ``event_feed`` keeps it in step with the workers; ``scoring`` weighs cached tokens against load;
``sessions`` remembers where a conversation was. :class:`vla_cloud.core.placement.Placement` puts them together.
"""
