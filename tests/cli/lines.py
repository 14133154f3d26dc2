"""Parts of command lines that several tests type."""

TINY = ("--gin_file=gin/models/switch_tiny.gin --gin_file=gin/tasks/docs_corpus_bytes.gin "
        "--gin_file=gin/runs/pretrain.gin")
# One layer a stack, every one of them sparse.
SHALLOW = ("--gin.SwitchConfig.num_encoder_layers=1 --gin.SwitchConfig.num_decoder_layers=1 "
           "--gin.SwitchConfig.encoder_sparse_step=1 --gin.SwitchConfig.decoder_sparse_step=1")
