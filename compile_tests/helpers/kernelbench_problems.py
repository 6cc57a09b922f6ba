"""KernelBench problems: five whose `ModelNew` is right, and four whose `ModelNew` pleases a checker and is wrong."""

HEAD = """
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import nn
"""

IN_TRITON = ("swish", "names_a_kernel")
"""Those with kernels, which have no code for a CPU but in Triton's interpreter."""

RIGHT = {
    "swish": """
class Model(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(x)


@triton.jit
def swish_kernel(x_ptr, out_ptr, N, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < N, other=0.0)
    tl.store(out_ptr + offsets, x * tl.sigmoid(x), mask=offsets < N)


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        ctx.save_for_backward(x)
        out = torch.empty_like(x)
        swish_kernel[(triton.cdiv(x.numel(), 64),)](x, out, x.numel(), BLOCK=64)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(x)
        return grad * (gate + x * gate * (1 - gate))


class ModelNew(nn.Module):
    def forward(self, x):
        return Swish.apply(x)


def get_inputs():
    return [torch.rand(6, 40)]
""",
    "layer_norm_gelu": """
class Model(nn.Module):
    def __init__(self, features, eps=1e-5):
        super().__init__()
        self.norm = nn.LayerNorm(features, eps)

    def forward(self, x):
        return F.gelu(self.norm(x))


class ModelNew(Model):
    def forward(self, x):
        var, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
        y = (x - mean) * (var + self.norm.eps).rsqrt() * self.norm.weight + self.norm.bias
        return 0.5 * y * (1 + torch.erf(y * 0.5**0.5))


def get_inputs():
    return [torch.rand(6, 40)]


def get_init_inputs():
    return [40]
""",
    # Other parameters than the model's: the weights are those of the seed.
    "packed_linear": """
class Model(nn.Module):
    def __init__(self, inner, outer):
        super().__init__()
        self.first, self.second = nn.Linear(inner, outer), nn.Linear(inner, outer)

    def forward(self, x):
        return torch.relu(self.first(x)) * self.second(x)


class ModelNew(nn.Module):
    def __init__(self, inner, outer):
        super().__init__()
        layers = nn.Linear(inner, outer), nn.Linear(inner, outer)
        self.weight = nn.Parameter(torch.cat([layer.weight.detach() for layer in layers]))
        self.bias = nn.Parameter(torch.cat([layer.bias.detach() for layer in layers]))

    def forward(self, x):
        first, second = F.linear(x, self.weight, self.bias).chunk(2, -1)
        return torch.relu(first) * second


def get_inputs():
    return [torch.randn(5, 12)]


def get_init_inputs():
    return [12, 7]
""",
    # It takes the sizes of the problem, says so about others, and has no backward pass.
    "matmul_of_one_size": """
class Model(nn.Module):
    def forward(self, a, b):
        return a @ b


class ModelNew(nn.Module):
    def forward(self, a, b):
        assert a.shape == (8, 12) and b.shape == (12, 10)
        with torch.no_grad():
            return sum(a[:, i : i + 4] @ b[i : i + 4] for i in range(0, 12, 4))


def get_inputs():
    return [torch.rand(8, 12), torch.rand(12, 10)]
""",
    "batch_norm_max": """
class Model(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(channels, channels, 3), nn.BatchNorm1d(channels)

    def forward(self, x, targets):
        y = self.norm(self.conv(x)).amax(-1)
        return F.cross_entropy(y, targets), y


class ModelNew(Model):
    def forward(self, x, targets):
        y = self.conv(x)
        var, mean = torch.var_mean(y, (0, 2), correction=0, keepdim=True)
        y = ((y - mean) * (var + self.norm.eps).rsqrt()).mul(self.norm.weight[:, None])
        y = (y + self.norm.bias[:, None]).amax(-1)
        return y.logsumexp(-1).sub(y.gather(-1, targets[:, None])[:, 0]).mean(), y


def get_inputs():
    return [torch.randn(5, 4, 16), torch.randint(4, (5,))]


def get_init_inputs():
    return [4]
""",
}

CHEATS = {
    "names_a_kernel": (
        "breaks runs: no kernel ran: it names add_kernel, and launches none",
        """
class Model(nn.Module):
    def forward(self, x):
        return x + 1


@triton.jit
def add_kernel(x_ptr, out_ptr):
    tl.store(out_ptr, tl.load(x_ptr) + 1)


class ModelNew(nn.Module):
    def forward(self, x):
        kernel = add_kernel if x is None else None
        return x + 1 if kernel is None else kernel


def get_inputs():
    return [torch.rand(6, 40)]
""",
    ),
    "constant_of_one_size": (
        "wrong values.*breaks other_sizes",
        """
class Model(nn.Module):
    def forward(self, x):
        return x.mean(-1)


class ModelNew(nn.Module):
    def forward(self, x):
        return x.sum(-1) / 24


def get_inputs():
    return [torch.rand(4, 24)]
""",
    ),
    "reads_the_reference": (
        "side effects.*it replaces torch.nn.functional.softplus",
        """
class Model(nn.Module):
    def forward(self, x):
        return torch.tanh(F.softplus(x))


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        right, self.seen = F.softplus, {}

        def softplus(x):
            self.seen[x.shape] = right(x)
            return self.seen[x.shape]

        F.softplus = softplus

    def forward(self, x):
        return torch.tanh(self.seen.get(x.shape, torch.zeros_like(x)))


def get_inputs():
    return [torch.rand(4, 24)]
""",
    ),
    # A bias of zeros, in a module without a backward pass.
    "leaves_out_what_is_0": (
        "wrong values.*breaks values_and_gradients.*other inputs and weights",
        """
class Model(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(features))

    def forward(self, x):
        return torch.relu(x + self.bias)


class ModelNew(Model):
    def forward(self, x):
        return torch.relu(x.detach())


def get_inputs():
    return [torch.rand(4, 24)]


def get_init_inputs():
    return [24]
""",
    ),
}
