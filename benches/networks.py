"""Networks with random weights for `coremltools_models.py`: each name makes a torch module, its inputs and the names of its states.

torchvision's and transformers' own where they have them; widths are cut where only the operations matter.
"""
import math
import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """Norm, activation, convolution, twice, with a step's embedding between them and the input added."""
    def __init__(self, c_in, c_out, emb):
        super().__init__()
        self.a, self.b = nn.GroupNorm(16, c_in), nn.GroupNorm(16, c_out)
        self.c, self.d = nn.Conv2d(c_in, c_out, 3, padding=1), nn.Conv2d(c_out, c_out, 3, padding=1)
        self.e = nn.Linear(emb, c_out)
        self.skip = nn.Conv2d(c_in, c_out, 1) if c_in != c_out else nn.Identity()

    def forward(self, x, emb):
        h = self.c(F.silu(self.a(x))) + self.e(emb)[:, :, None, None]
        return self.skip(x) + self.d(F.silu(self.b(h)))


class Attention(nn.Module):
    """Attention over the pixels of an image."""
    def __init__(self, c, heads=4):
        super().__init__()
        self.norm, self.qkv, self.out, self.heads = nn.GroupNorm(16, c), nn.Linear(c, 3 * c), nn.Linear(c, c), heads

    def forward(self, x):
        b, c, h, w = map(int, x.shape)
        t = self.norm(x).reshape(b, c, h * w).permute(0, 2, 1)
        q, k, v = (p.reshape(b, h * w, self.heads, c // self.heads).permute(0, 2, 1, 3) for p in self.qkv(t).split(c, -1))
        s = torch.softmax(q @ k.transpose(-1, -2) * (c // self.heads) ** -0.5, -1)
        return x + self.out((s @ v).permute(0, 2, 1, 3).reshape(b, h * w, c)).permute(0, 2, 1).reshape(b, c, h, w)


class UNet(nn.Module):
    """A U-Net as diffusion models have them: 64 to 256 channels, three levels, attention at the lowest."""
    def __init__(self, base=64, emb=256):
        super().__init__()
        self.first, self.time = nn.Conv2d(4, base, 3, padding=1), nn.Linear(emb, emb)
        c = [base, 2 * base, 4 * base]
        self.down = nn.ModuleList([Block(base, c[0], emb), Block(c[0], c[1], emb), Block(c[1], c[2], emb)])
        self.smaller = nn.ModuleList([nn.Conv2d(c[0], c[0], 3, 2, 1), nn.Conv2d(c[1], c[1], 3, 2, 1)])
        self.mid, self.att = Block(c[2], c[2], emb), Attention(c[2])
        self.up = nn.ModuleList([Block(2 * c[2], c[2], emb), Block(c[2] + c[1], c[1], emb), Block(c[1] + c[0], c[0], emb)])
        self.larger = nn.ModuleList([nn.Conv2d(c[2], c[2], 3, padding=1), nn.Conv2d(c[1], c[1], 3, padding=1)])
        self.norm, self.last = nn.GroupNorm(16, base), nn.Conv2d(base, 4, 3, padding=1)

    def forward(self, x, t):
        emb, x, kept = F.silu(self.time(t)), self.first(x), []
        for i, block in enumerate(self.down):
            x = block(x, emb)
            kept.append(x)
            x = self.smaller[i](x) if i < 2 else x
        x = self.att(self.mid(x, emb))
        for i, block in enumerate(self.up):
            x = block(torch.cat([x, kept.pop()], 1), emb)
            x = self.larger[i](F.interpolate(x, scale_factor=2.0, mode="nearest")) if i < 2 else x
        return self.last(F.silu(self.norm(x)))


class Segmenter(nn.Module):
    """A U-Net as segmentation has them: 32 to 256 channels, four levels, each enlarged by a transposed convolution."""
    def __init__(self, c=(32, 64, 128, 256)):
        super().__init__()
        two = lambda a, b: nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(),
                                         nn.Conv2d(b, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())
        self.down = nn.ModuleList([two(a, b) for a, b in zip((3, *c), c)])
        self.larger = nn.ModuleList([nn.ConvTranspose2d(a, b, 2, 2) for a, b in zip(c[:0:-1], c[-2::-1])])
        self.up = nn.ModuleList([two(2 * b, b) for b in c[-2::-1]])
        self.last = nn.Conv2d(c[0], 2, 1)

    def forward(self, x):
        kept = []
        for i, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if i else x)
            kept.append(x)
        kept.pop()
        for larger, block in zip(self.larger, self.up):
            x = block(torch.cat([larger(x), kept.pop()], 1))
        return self.last(x)


class Generator(nn.Module):
    """The generator of DCGAN: transposed convolutions alone, from 100 numbers to an image of 64 x 64."""
    def __init__(self, c=(512, 256, 128, 64)):
        super().__init__()
        layers = [nn.ConvTranspose2d(100, c[0], 4, 1, 0, bias=False), nn.BatchNorm2d(c[0]), nn.ReLU()]
        for a, b in zip(c, c[1:]):
            layers += [nn.ConvTranspose2d(a, b, 4, 2, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.ConvTranspose2d(c[-1], 3, 4, 2, 1), nn.Tanh())

    def forward(self, x):
        return self.layers(x)


class Yolo(nn.Module):
    """A detector as YOLO has them: residual blocks, pooling pyramid, two scales, boxes decoded from distances, then NMS."""
    def __init__(self, classes=20, width=32):
        super().__init__()
        conv = lambda a, b, k=3, s=1: nn.Sequential(nn.Conv2d(a, b, k, s, k // 2, bias=False), nn.BatchNorm2d(b), nn.SiLU())
        c, self.classes = width, classes
        self.stem = nn.Sequential(conv(3, c, 3, 2), conv(c, 2 * c, 3, 2))
        self.a, self.b = nn.Sequential(conv(2 * c, c, 1), conv(c, 2 * c)), conv(2 * c, 4 * c, 3, 2)
        self.c, self.d = nn.Sequential(conv(4 * c, 2 * c, 1), conv(2 * c, 4 * c)), conv(4 * c, 8 * c, 3, 2)
        self.pool, self.join = conv(8 * c, 4 * c, 1), conv(16 * c, 8 * c, 1)
        self.up = conv(12 * c, 4 * c)
        self.heads = nn.ModuleList([nn.Conv2d(4 * c, 4 + classes, 1), nn.Conv2d(8 * c, 4 + classes, 1)])

    def forward(self, x):
        x = self.stem(x)
        x = self.b(x + self.a(x))
        small = x = x + self.c(x)
        p = [self.pool(self.d(x))]
        for _ in range(3):
            p.append(F.max_pool2d(p[-1], 5, 1, 2))
        large = self.join(torch.cat(p, 1))
        small = self.up(torch.cat([F.interpolate(large, scale_factor=2.0, mode="nearest"), small], 1))
        boxes, scores = [], []
        for head, x, step in zip(self.heads, (small, large), (8.0, 16.0)):
            y = head(x)
            n = int(y.shape[2])
            at = (torch.arange(n, dtype=torch.float32) + 0.5) * step
            grid = torch.stack(torch.meshgrid(at, at, indexing="xy"), 0).reshape(1, 2, n * n)
            y = y.reshape(1, 4 + self.classes, n * n)
            near, far = F.softplus(y[:, :2]) * step, F.softplus(y[:, 2:4]) * step
            boxes.append(torch.cat([grid - near, grid + far], 1))
            scores.append(torch.sigmoid(y[:, 4:]))
        boxes, scores = torch.cat(boxes, 2)[0].transpose(0, 1), torch.cat(scores, 2)[0].max(0)[0]
        return boxes, scores, *self.chosen(boxes, scores)

    @staticmethod
    def chosen(boxes, scores):
        import torchvision
        kept = torchvision.ops.nms(boxes, scores, 0.5)
        return boxes[kept], scores[kept]


class SequenceTagger(nn.Module):
    """Embedding, two recurrent layers, scores of each token."""
    def __init__(self, kind, bidirectional=True):
        super().__init__()
        self.embed = nn.Embedding(5000, 128)
        self.layers = getattr(nn, kind)(128, 192, num_layers=2, bidirectional=bidirectional, batch_first=True)
        self.head = nn.Linear(384 if bidirectional else 192, 24)

    def forward(self, ids):
        return self.head(self.layers(self.embed(ids))[0])


class LanguageLstm(nn.Module):
    """One token's step of a language model: states go in and come out."""
    def __init__(self):
        super().__init__()
        self.embed, self.cell = nn.Embedding(8000, 512), nn.LSTM(512, 512, num_layers=2, batch_first=True)
        self.head = nn.Linear(512, 8000)

    def forward(self, ids, h, c):
        y, (h, c) = self.cell(self.embed(ids), (h, c))
        return self.head(y), h, c


class TextReader(nn.Module):
    """Reads a line of text from an image: convolutions, columns as a sequence, two recurrent layers, scores for CTC."""
    def __init__(self):
        super().__init__()
        conv = lambda a, b: nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())
        self.convs = nn.Sequential(conv(1, 32), nn.MaxPool2d(2), conv(32, 64), nn.MaxPool2d(2), conv(64, 128),
                                   nn.MaxPool2d((2, 1)), conv(128, 256), nn.MaxPool2d((4, 1)))
        self.layers, self.head = nn.LSTM(256, 128, num_layers=2, bidirectional=True), nn.Linear(256, 80)

    def forward(self, image):
        x = self.convs(image).squeeze(2).permute(2, 0, 1)
        return F.log_softmax(self.head(self.layers(x)[0]), -1)


class SpeechCommands(nn.Module):
    """A waveform's log spectrogram, convolutions, a GRU and classes."""
    def __init__(self):
        super().__init__()
        self.register_buffer("window", torch.hann_window(400))
        bank = torch.zeros(40, 201)
        for i in range(40):
            at = torch.arange(201) / 201.0
            bank[i] = torch.clamp(1 - (at - ((i + 1) / 41.0) ** 1.5).abs() * (24 - i / 3), min=0)
        self.register_buffer("bank", bank)
        self.a, self.b = nn.Conv1d(40, 64, 5, 2, 2), nn.Conv1d(64, 96, 5, 2, 2)
        self.gru, self.head = nn.GRU(96, 96, batch_first=True), nn.Linear(96, 35)

    def forward(self, wave):
        s = torch.stft(wave, 400, 160, window=self.window, center=False, return_complex=True)
        x = torch.log(torch.matmul(self.bank, s.real ** 2 + s.imag ** 2) + 1e-3)
        x = F.relu(self.b(F.relu(self.a(x)))).transpose(1, 2)
        return self.head(self.gru(x)[0][:, -1])


class SeparationNet(nn.Module):
    """Separates sounds as Conv-TasNet does: learned filters, dilated depthwise convolutions with gates, transposed filters."""
    def __init__(self, c=128):
        super().__init__()
        self.filters, self.back = nn.Conv1d(1, c, 16, 8, bias=False), nn.ConvTranspose1d(c, 1, 16, 8, bias=False)
        self.inner = nn.ModuleList([nn.Sequential(nn.Conv1d(c, 2 * c, 1), nn.PReLU(), nn.GroupNorm(1, 2 * c),
                                    nn.Conv1d(2 * c, 2 * c, 3, padding=2**i, dilation=2**i, groups=2 * c), nn.PReLU(),
                                    nn.GroupNorm(1, 2 * c), nn.Conv1d(2 * c, c, 1)) for i in range(6)])
        self.mask = nn.Conv1d(c, 2 * c, 1)

    def forward(self, wave):
        x = y = F.relu(self.filters(wave))
        for layer in self.inner:
            y = y + layer(y)
        a, b = torch.sigmoid(self.mask(y)).chunk(2, 1)
        return self.back(x * a), self.back(x * b)


class SuperResolution(nn.Module):
    """Enlarges an image three times: convolutions and a shuffle of pixels, beside a bicubic-like resampling."""
    def __init__(self, c=48):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, c, 5, padding=2, padding_mode="reflect"), nn.Conv2d(c, c, 3, padding=1)
        self.c, self.shuffle = nn.Conv2d(c, 27, 3, padding=1), nn.PixelShuffle(3)

    def forward(self, x):
        y = self.shuffle(self.c(F.leaky_relu(self.b(F.leaky_relu(self.a(x), 0.1)), 0.1)))
        return y + F.interpolate(x, scale_factor=3.0, mode="bilinear", align_corners=False)


class SpatialTransformer(nn.Module):
    """Turns an image by a transform that it finds itself: affine grid and sampling."""
    def __init__(self):
        super().__init__()
        self.find = nn.Sequential(nn.Conv2d(1, 8, 7), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(8, 10, 5), nn.MaxPool2d(2), nn.ReLU())
        self.head, self.last = nn.Linear(10 * 3 * 3, 6), nn.Conv2d(1, 10, 28)
        self.head.bias.data = torch.tensor([1.0, 0.2, 0, -0.1, 0.9, 0.1])
        self.head.weight.data *= 0.1

    def forward(self, x):
        theta = self.head(self.find(x).reshape(-1, 90)).reshape(-1, 2, 3)
        x = F.grid_sample(x, F.affine_grid(theta, (1, 1, 28, 28), align_corners=False), align_corners=False)
        return self.last(x).flatten(1)


class Gpt2(nn.Module):
    """GPT-2 without a cache, logits of all positions; blocks are transformers' own."""
    def __init__(self, **config):
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel
        self.m = GPT2LMHeadModel(GPT2Config(use_cache=False, attn_implementation="eager", **config))

    def forward(self, ids):
        g, n = self.m.transformer, int(ids.shape[1])
        x = g.wte(ids) + g.wpe.weight[:n]
        mask = torch.full((n, n), -1e4).triu(1)[None, None]
        for block in g.h:
            h, a = block.ln_1(x), block.attn
            q, k, v = (p.reshape(1, n, a.num_heads, a.head_dim).permute(0, 2, 1, 3) for p in a.c_attn(h).split(a.split_size, 2))
            s = torch.softmax(q @ k.transpose(-1, -2) * a.head_dim ** -0.5 + mask, -1)
            x = x + a.c_proj((s @ v).permute(0, 2, 1, 3).reshape(1, n, -1))
            x = x + block.mlp(block.ln_2(x))
        return self.m.lm_head(g.ln_f(x))


class Llama(nn.Module):
    """Llama with its cache as Core ML states: tokens at `at..end` are written into it. Layers are transformers' own."""
    def __init__(self, slots=64, **config):
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM
        self.m = LlamaForCausalLM(LlamaConfig(**config))
        c = self.m.config
        shape = (c.num_hidden_layers, c.num_key_value_heads, slots, c.hidden_size // c.num_attention_heads)
        self.register_buffer("k_cache", torch.zeros(shape))
        self.register_buffer("v_cache", torch.zeros(shape))
        angles = torch.arange(slots)[:, None] / 10000.0 ** (torch.arange(0, shape[-1], 2) / shape[-1])
        self.register_buffer("cos", torch.cat([angles.cos()] * 2, -1), persistent=False)
        self.register_buffer("sin", torch.cat([angles.sin()] * 2, -1), persistent=False)

    def forward(self, ids, mask):
        c, n, end = self.m.config, ids.shape[-1], mask.shape[-1]
        at = end - n
        d = c.hidden_size // c.num_attention_heads
        cos, sin = self.cos[at:end], self.sin[at:end]
        turn = lambda v: v * cos + torch.cat([-v[..., d // 2:], v[..., : d // 2]], -1) * sin
        x = self.m.model.embed_tokens(ids)
        for i, layer in enumerate(self.m.model.layers):
            h, a = layer.input_layernorm(x), layer.self_attn
            q, k, v = (p(h).reshape(1, n, -1, d).transpose(1, 2) for p in (a.q_proj, a.k_proj, a.v_proj))
            self.k_cache[i : i + 1, :, at:end] = turn(k)
            self.v_cache[i : i + 1, :, at:end] = v
            k, v = self.k_cache[i : i + 1, :, :end], self.v_cache[i : i + 1, :, :end]
            share = c.num_attention_heads // c.num_key_value_heads
            k, v = (p.repeat_interleave(share, 1) for p in (k, v))
            s = torch.softmax(turn(q) @ k.transpose(-1, -2) * d**-0.5 + mask, -1)
            x = x + a.o_proj((s @ v).transpose(1, 2).reshape(1, n, -1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.m.lm_head(self.m.model.norm(x))


class LlamaLayers(nn.Module):
    """Layers of Llama 3.2 1B without cache, embedding and head: their weights are what is compressed."""
    def __init__(self, layers):
        super().__init__()
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer
        c = LlamaConfig(hidden_size=2048, intermediate_size=8192, num_attention_heads=32, num_key_value_heads=8)
        self.layers = nn.ModuleList([LlamaDecoderLayer(c, i) for i in range(layers)])

    def forward(self, x):
        for layer in self.layers:
            h, a = layer.input_layernorm(x), layer.self_attn
            q, k, v = (p(h).reshape(1, 8, -1, 64).transpose(1, 2) for p in (a.q_proj, a.k_proj, a.v_proj))
            k, v = (p.repeat_interleave(4, 1) for p in (k, v))
            s = torch.softmax(q @ k.transpose(-1, -2) * 0.125, -1)
            x = x + a.o_proj((s @ v).transpose(1, 2).reshape(1, 8, 2048))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return x


class Call(nn.Module):
    """A module called with other arguments, and some of its results."""
    def __init__(self, module, call):
        super().__init__()
        self.module, self.call = module, call

    def forward(self, *inputs):
        return self.call(self.module, *inputs)


def _image(size=224, channels=3):
    return {"image": torch.randn(1, channels, size, size)}


def _ids(n, vocabulary, name="ids"):
    return {name: torch.randint(3, vocabulary, (1, n), dtype=torch.int32)}


def _torchvision(name, size=224, **options):
    def make():
        import torchvision
        model = torchvision.models.get_model(name, weights=None, **options)
        model.eval()
        return model, _image(size)
    return make


def _dict_output(name, size):
    def make():
        import torchvision
        model = torchvision.models.get_model(name, weights=None, weights_backbone=None)
        return Call(model, lambda m, x: m(x)["out"]), _image(size)
    return make


def _detector():
    """SSDlite: scores and distances of all anchors, before they are chosen."""
    import torchvision
    m = torchvision.models.detection.ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None)
    def call(m, x):
        y = m.head(list(m.backbone(x).values()))
        return y["bbox_regression"], y["cls_logits"]
    return Call(m, call), _image(320)


def _pyramid():
    """Faster R-CNN's backbone with its feature pyramid and the heads that propose regions."""
    import torchvision
    m = torchvision.models.detection.fasterrcnn_mobilenet_v3_large_fpn(weights=None, weights_backbone=None)
    def call(m, x):
        scores, boxes = m.rpn.head(list(m.backbone(x).values()))
        return (*scores, *boxes)
    return Call(m, call), _image(256)


def _video():
    """Convolutions over time and space; the pool of a fixed size stands for one that coremltools does not know."""
    import torchvision
    m = torchvision.models.video.r3d_18(weights=None)
    m.avgpool = nn.AvgPool3d((1, 4, 4))
    return m, {"clip": torch.randn(1, 3, 8, 64, 64)}


def _vision_transformer():
    import torchvision
    m = torchvision.models.vit_b_16(weights=None)
    nn.init.normal_(m.heads.head.weight, std=0.05)  # zero without training
    return m, _image()


def _transformers(kind, config, inputs, call, **options):
    def make():
        import transformers
        options_ = {"attn_implementation": "eager", **options}
        c = getattr(transformers, config[0])(**config[1])
        c._attn_implementation = "eager"
        model = getattr(transformers, kind)(c)
        return Call(model, call), inputs()
    return make


def _causal(n):
    return torch.full((1, 1, n, n), -1e4).triu(1)


_BERT = dict(hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024)
_WHISPER = dict(d_model=384, encoder_layers=4, decoder_layers=4, encoder_attention_heads=6, decoder_attention_heads=6,
                encoder_ffn_dim=1536, decoder_ffn_dim=1536, vocab_size=8000, max_source_positions=500, pad_token_id=0, bos_token_id=1,
                eos_token_id=2, decoder_start_token_id=1)
_T5 = dict(d_model=256, d_kv=64, d_ff=1024, num_layers=3, num_heads=4, vocab_size=8000)
_LLAMA = dict(hidden_size=256, intermediate_size=704, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2, vocab_size=4000)


def _bert_inputs():
    mask = torch.zeros(1, 1, 1, 64)
    mask[..., 50:] = -1e4
    return {**_ids(64, 30000), "mask": mask}


NETWORKS = {
    **{name: _torchvision(name, size) for name, size in [
        ("resnet18", 224), ("resnet50", 224), ("mobilenet_v2", 224), ("mobilenet_v3_large", 224), ("efficientnet_b0", 224),
        ("convnext_tiny", 224), ("swin_t", 224), ("densenet121", 224), ("shufflenet_v2_x1_0", 224),
        ("regnet_y_400mf", 224), ("squeezenet1_1", 224)]},
    "vit_b_16": _vision_transformer,
    "inception_v3": _torchvision("inception_v3", 299, init_weights=False),
    "googlenet": _torchvision("googlenet", 224, init_weights=False),
    "deeplabv3": _dict_output("deeplabv3_mobilenet_v3_large", 256),
    "fcn_resnet50": _dict_output("fcn_resnet50", 128),
    "lraspp": _dict_output("lraspp_mobilenet_v3_large", 256),
    "ssdlite": _detector,
    "faster_rcnn_proposals": _pyramid,
    "video_r3d": _video,
    "yolo": lambda: (Yolo(), _image(256)),
    "unet": lambda: (UNet(), {"latent": torch.randn(1, 4, 64, 64), "step": torch.randn(1, 256)}),
    "segmenter": lambda: (Segmenter(), _image(256)),
    "generator": lambda: (Generator(), {"noise": torch.randn(1, 100, 1, 1)}),
    "super_resolution": lambda: (SuperResolution(), _image(96)),
    "spatial_transformer": lambda: (SpatialTransformer(), _image(28, 1)),
    "lstm_tagger": lambda: (SequenceTagger("LSTM"), _ids(64, 5000)),
    "gru_tagger": lambda: (SequenceTagger("GRU"), _ids(64, 5000)),
    "rnn_tagger": lambda: (SequenceTagger("RNN", bidirectional=False), _ids(64, 5000)),
    "lstm_token": lambda: (LanguageLstm(), {**_ids(1, 8000), "h": torch.randn(2, 1, 512), "c": torch.randn(2, 1, 512)}),
    "text_reader": lambda: (TextReader(), {"image": torch.randn(1, 1, 32, 256)}),
    "speech_commands": lambda: (SpeechCommands(), {"wave": torch.randn(1, 16000)}),
    "separation": lambda: (SeparationNet(), {"wave": torch.randn(1, 1, 8000)}),
    "gpt2": lambda: (Gpt2(), _ids(128, 50257)),
    "gpt2_token": lambda: (Gpt2(), _ids(1, 50257)),
    "llama": lambda: (Llama(**_LLAMA), {**_ids(12, 4000), "mask": torch.full((1, 1, 12, 20), -1e4).triu(9)}),
    "llama_1b_layer": lambda: (LlamaLayers(1), {"x": torch.randn(1, 8, 2048)}),
    "bert": _transformers("BertModel", ("BertConfig", _BERT), _bert_inputs,
                          lambda m, ids, mask: m(input_ids=ids, attention_mask=mask).last_hidden_state),
    "distilbert": _transformers("DistilBertForSequenceClassification", ("DistilBertConfig", dict(dim=256, n_layers=3, n_heads=4, hidden_dim=1024)),
                                _bert_inputs, lambda m, ids, mask: m(input_ids=ids, attention_mask=mask).logits),
    "t5_encoder": _transformers("T5EncoderModel", ("T5Config", _T5), lambda: _ids(48, 8000),
                                lambda m, ids: m(input_ids=ids, attention_mask=torch.zeros(1, 1, 1, 48)).last_hidden_state),
    "t5_decoder": _transformers("T5Model", ("T5Config", _T5), lambda: {**_ids(16, 8000), "encoded": torch.randn(1, 48, 256)},
                                lambda m, ids, e: m.decoder(input_ids=ids, encoder_hidden_states=e, attention_mask=_causal(16),
                                                            encoder_attention_mask=torch.zeros(1, 1, 1, 48), use_cache=False)[0]),
    "whisper_encoder": _transformers("WhisperModel", ("WhisperConfig", _WHISPER), lambda: {"mel": torch.randn(1, 80, 1000)},
                                     lambda m, mel: m.encoder(mel).last_hidden_state),
    "whisper_decoder": _transformers("WhisperModel", ("WhisperConfig", _WHISPER), lambda: {**_ids(16, 8000), "encoded": torch.randn(1, 500, 384)},
                                     lambda m, ids, e: m.decoder(input_ids=ids, encoder_hidden_states=e, attention_mask=_causal(16),
                                                                 use_cache=False).last_hidden_state),
    "clip_image": _transformers("CLIPVisionModelWithProjection",
                                ("CLIPVisionConfig", dict(hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4)),
                                _image, lambda m, x: m(pixel_values=x).image_embeds),
    "clip_text": _transformers("CLIPTextModelWithProjection",
                               ("CLIPTextConfig", dict(hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4)),
                               lambda: _ids(32, 40000), lambda m, ids: m(input_ids=ids, attention_mask=_causal(32)).text_embeds),
    "wav2vec2": _transformers("Wav2Vec2ForCTC", ("Wav2Vec2Config", dict(hidden_size=256, num_hidden_layers=3, num_attention_heads=4, intermediate_size=1024)),
                              lambda: {"wave": torch.randn(1, 16000)}, lambda m, x: m(x).logits),
    "segformer": _transformers("SegformerForSemanticSegmentation", ("SegformerConfig", dict(num_labels=19)), lambda: _image(128),
                               lambda m, x: m(pixel_values=x).logits),
    "encodec": _transformers("EncodecModel", ("EncodecConfig", {}), lambda: {"wave": torch.randn(1, 1, 3200)},
                             lambda m, x: m.decoder(m.encoder(x))),
}


def expected(name, got, results):
    """What results should be, given ours. Boxes are chosen from those that we found; in fp16 some of them by a hair, and in any order
    of equal scores, so that about as many of about the same scores will do."""
    if name != "yolo" or len(got) != 4:
        return results
    boxes, scores = Yolo.chosen(*map(torch.from_numpy, got[:2]))
    n = min(len(scores), len(got[3]))
    near = (torch.sort(scores)[0][-n:] - torch.sort(torch.from_numpy(got[3]))[0][-n:]).abs().max() < 0.05
    if abs(len(scores) - len(got[3])) <= 0.01 * n and near and len(boxes) != len(got[2]):
        return [*results[:2], *got[2:]]
    return [*results[:2], boxes.numpy(), scores.numpy()]


def make(name):
    """Makes a network and its inputs: running means and variances of its norms are those of random inputs."""
    torch.manual_seed(7)
    torch.backends.mha.set_fastpath_enabled(False)  # an op of its own, which coremltools does not know
    model, inputs = NETWORKS[name]()
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    model.eval()
    # Residual branches of trained networks are small; else random ones enlarge any error.
    for block in model.modules():
        if type(block).__name__ == "Bottleneck":
            nn.init.constant_(block.bn3.weight, 0.2)
    if norms:
        for m in norms:
            m.momentum = None
            m.train()
        with torch.no_grad():
            for _ in range(2):
                model(*(torch.randn_like(torch.cat([v] * 2) if v.shape[0] == 1 and name != "yolo" else v) for v in inputs.values()))
        model.eval()
    return model, inputs
