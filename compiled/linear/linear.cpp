// The torch operator streamengine::linear on top of product.h (and, in function.h, its short cut), through torch's stable C interface: its C++ headers
// would take longer to compile than all of the kernel.

#include "function.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <functional>
#include <numeric>
#include <stdexcept>
#include <string>

#include "product.h"

namespace {

void require(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error("streamengine::linear: " + what);
}

void check(AOTITorchError error) { require(error == AOTI_TORCH_SUCCESS, "torch refused a call"); }

// A tensor that torch has handed over, or none.
struct Tensor {
  explicit Tensor(AtenTensorHandle owned) : handle(owned) {
    if (!handle) return;
    check(aoti_torch_get_dim(handle, &dims));
    check(aoti_torch_get_sizes(handle, &sizes));
    check(aoti_torch_get_strides(handle, &strides));
    check(aoti_torch_get_dtype(handle, &dtype));
    check(aoti_torch_get_data_ptr(handle, reinterpret_cast<void**>(&data)));
  }
  Tensor(const Tensor&) = delete;
  ~Tensor() {
    if (handle) aoti_torch_delete_tensor_object(handle);
  }

  bool is_contiguous() const {
    int64_t expected = 1;
    for (int64_t d = dims - 1; d >= 0; expected *= sizes[d--])
      if (sizes[d] != 1 && strides[d] != expected) return false;
    return true;
  }

  AtenTensorHandle handle;
  int64_t dims = 0, *sizes = nullptr, *strides = nullptr;
  int32_t dtype = -1;
  char* data = nullptr;
};

AtenTensorHandle optional(StableIValue value) {
  if (!value) return nullptr;
  const auto* held = reinterpret_cast<StableIValue*>(value);
  const auto handle = reinterpret_cast<AtenTensorHandle>(*held);
  delete held;
  return handle;
}

// The rows of x [..., K], each in whole words: where they are, if they lie like that, or in a copy.
class Rows {
 public:
  Rows(const Tensor& x, int64_t element, int64_t steps) : x_(x), element_(element) {
    const int64_t inner = x.sizes[x.dims - 1];
    count = std::accumulate(x.sizes, x.sizes + x.dims - 1, int64_t{1}, std::multiplies<>());
    const bool dense = inner <= 1 || x.strides[x.dims - 1] == 1;
    stride = count > 1 ? offset(1) : 0;
    data = x.data;
    if (dense && inner * element == steps * 4 && is_even()) return;
    stride = steps * 4;
    copy_.resize(count * stride);
    for (int64_t row = 0; row < count; row++)
      for (int64_t i = 0; i < inner; i++)
        std::memcpy(&copy_[row * stride + i * element], x.data + offset(row) + i * x.strides[x.dims - 1] * element, element);
    data = copy_.data();
  }

  int64_t count, stride;
  const char* data;

 private:
  int64_t offset(int64_t row) const {
    int64_t at = 0;
    for (int64_t d = x_.dims - 2; d >= 0; row /= x_.sizes[d--]) at += row % x_.sizes[d] * x_.strides[d];
    return at * element_;
  }

  // Whether all rows are `stride` apart.
  bool is_even() const {
    int64_t rows = 1;
    for (int64_t d = x_.dims - 2; d >= 0; rows *= x_.sizes[d--])
      if (x_.sizes[d] > 1 && x_.strides[d] * element_ != rows * stride) return false;
    return true;
  }

  const Tensor& x_;
  int64_t element_;
  std::vector<char> copy_;
};

AtenTensorHandle empty_like_rows(const Tensor& x, int64_t outputs) {
  std::vector<int64_t> sizes(x.sizes, x.sizes + x.dims), strides(x.dims, 1);
  sizes.back() = outputs;
  for (int64_t d = x.dims - 2; d >= 0; d--) strides[d] = strides[d + 1] * sizes[d + 1];
  AtenTensorHandle out;
  check(aoti_torch_empty_strided(x.dims, sizes.data(), strides.data(), x.dtype, aoti_torch_device_type_cpu(), 0, &out));
  return out;
}

// linear(Tensor x, Tensor packed, Tensor? bias, int out_features) -> Tensor
void linear_op(StableIValue* stack, uint64_t, uint64_t) {
  const Tensor x(reinterpret_cast<AtenTensorHandle>(stack[0])), packed(reinterpret_cast<AtenTensorHandle>(stack[1]));
  const Tensor bias(optional(stack[2]));
  const auto outputs = static_cast<int64_t>(stack[3]);
  const bool bfloat16 = x.dtype == aoti_torch_dtype_bfloat16();
  const int64_t element = bfloat16 ? 2 : 4;
  require(bfloat16 || x.dtype == aoti_torch_dtype_float32(), "x is neither float32 nor bfloat16");
  require(packed.dtype == x.dtype, "x and weight differ in dtype");
  require(x.dims > 0 && outputs >= 0, "x has no dimension, or out_features is negative");
  const int64_t steps = (x.sizes[x.dims - 1] * element + 3) / 4, panels = (outputs + linear::kPanel - 1) / linear::kPanel;
  require(packed.dims == 4 && packed.sizes[0] == panels && packed.sizes[1] == steps &&
              packed.sizes[2] == linear::kPanel && packed.sizes[3] * element == 4 && packed.is_contiguous(),
          "the weight was not packed for " + std::to_string(outputs) + " outputs of " +
              std::to_string(x.sizes[x.dims - 1]) + " inputs");
  require(!bias.handle || (bias.dtype == x.dtype && bias.dims == 1 && bias.sizes[0] == outputs && bias.is_contiguous()),
          "bias does not fit");
  const Rows rows(x, element, steps);
  const Tensor out(empty_like_rows(x, outputs));
  const linear::Problem problem{rows.data, rows.count, steps, rows.stride, packed.data, bias.data, outputs, out.data};
  if (bfloat16)
    linear::Product<linear::BFloat16>(problem).run();
  else
    linear::Product<linear::Float32>(problem).run();
  AtenTensorHandle result;
  check(aoti_torch_new_tensor_handle(out.handle, &result));
  stack[0] = reinterpret_cast<StableIValue>(result);
}

// Kept for as long as the process: what its destructor would unregister may still be called.
const TorchLibraryHandle kLibrary = [] {
  TorchLibraryHandle library;
  check(aoti_torch_library_init_impl("streamengine", "CPU", __FILE__, __LINE__, &library));
  check(aoti_torch_library_impl(library, "linear", linear_op));
  return library;
}();

}  // namespace
