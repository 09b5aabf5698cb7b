// streamengine::linear as a plain function of Python, for compiled pieces: a call of an operator goes through torch's
// dispatcher, which at one row takes longer than reading a small weight. Whatever is not as pieces have it (a layout,
// a padded row, a mistake) goes to the operator all the same, which copies or refuses it.

#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <initializer_list>
#include <tuple>

#include "product.h"

namespace function {

// What the caller knows of torch, and the names of what is asked of a tensor. All live as long as the process.
struct Torch {
  void* (*data)(PyObject*);
  PyObject *operation, *empty, *float32, *bfloat16;
  PyObject* shape = PyUnicode_InternFromString("shape");
  PyObject* dtype = PyUnicode_InternFromString("dtype");
  PyObject* is_contiguous = PyUnicode_InternFromString("is_contiguous");
};
static Torch torch;  // of this library, whatever others a process has loaded

class Owned {
 public:
  explicit Owned(PyObject* object) : object_(object) {}
  Owned(const Owned&) = delete;
  ~Owned() { Py_XDECREF(object_); }
  operator PyObject*() const { return object_; }

 private:
  PyObject* object_;
};

constexpr Py_ssize_t kMostDims = 8;

// The sizes of a contiguous tensor; `dims` is -1 for anything else.
struct Sizes {
  explicit Sizes(PyObject* tensor) {
    const Owned dense(PyObject_CallMethodNoArgs(tensor, torch.is_contiguous));
    const Owned owned(dense == Py_True ? PyObject_GetAttr(tensor, torch.shape) : nullptr);
    PyObject* shape = owned;
    if (shape && PyTuple_Check(shape) && PyTuple_GET_SIZE(shape) <= kMostDims) dims = PyTuple_GET_SIZE(shape);
    for (Py_ssize_t d = 0; d < dims; d++) sizes[d] = PyLong_AsSsize_t(PyTuple_GET_ITEM(shape, d));
    PyErr_Clear();
  }
  bool are(std::initializer_list<int64_t> expected) const {
    return dims == Py_ssize_t(expected.size()) && std::equal(expected.begin(), expected.end(), sizes);
  }

  Py_ssize_t dims = -1;
  int64_t sizes[kMostDims];
};

inline PyObject* new_output(const Sizes& x, int64_t outputs, PyObject* dtype) {
  const Owned sizes(PyTuple_New(x.dims)), strides(PyTuple_New(x.dims));
  if (!sizes || !strides) return nullptr;
  int64_t stride = 1;
  for (Py_ssize_t d = x.dims - 1; d >= 0; d--) {
    const int64_t size = d == x.dims - 1 ? outputs : x.sizes[d];
    PyTuple_SET_ITEM((PyObject*)sizes, d, PyLong_FromSsize_t(size));
    PyTuple_SET_ITEM((PyObject*)strides, d, PyLong_FromSsize_t(stride));
    stride *= std::max<int64_t>(1, size);
  }
  PyObject* given[] = {sizes, strides, dtype};
  return PyObject_Vectorcall(torch.empty, given, 3, nullptr);
}

inline PyObject* of_type(PyObject* tensor) {
  const Owned dtype(PyObject_GetAttr(tensor, torch.dtype));
  if (!dtype) PyErr_Clear();
  return dtype;  // torch has one object for each, which stays
}

// linear(x, packed, bias, out_features) of CPU tensors.
static PyObject* call(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (count != 4) return PyErr_Format(PyExc_TypeError, "linear takes 4 arguments, not %zd", count);
  const auto [x, packed, bias] = std::tuple(given[0], given[1], given[2]);
  const Sizes of_x(x), of_packed(packed);
  PyObject* dtype = of_x.dims > 0 && of_packed.dims == 4 ? of_type(x) : nullptr;
  const int64_t outputs = PyLong_AsSsize_t(given[3]), element = dtype == torch.bfloat16 ? 2 : 4;
  const int64_t row = of_x.dims > 0 ? of_x.sizes[of_x.dims - 1] * element : 0;
  const int64_t panels = (outputs + linear::kPanel - 1) / linear::kPanel;
  const bool fits = dtype && (dtype == torch.bfloat16 || dtype == torch.float32) && outputs >= 0 && row % 4 == 0 &&
                    of_type(packed) == dtype && of_packed.are({panels, row / 4, linear::kPanel, 4 / element}) &&
                    (bias == Py_None || (of_type(bias) == dtype && Sizes(bias).are({outputs})));
  if (!fits) {
    PyErr_Clear();
    return PyObject_Vectorcall(torch.operation, given, count, nullptr);
  }
  PyObject* out = new_output(of_x, outputs, dtype);
  if (!out) return nullptr;
  int64_t rows = 1;
  for (Py_ssize_t d = 0; d < of_x.dims - 1; d++) rows *= of_x.sizes[d];
  const auto data = [](PyObject* tensor) { return static_cast<char*>(torch.data(tensor)); };
  const linear::Problem problem{data(x), rows, row / 4, row, data(packed), bias == Py_None ? nullptr : data(bias),
                                outputs, data(out)};
  Py_BEGIN_ALLOW_THREADS;
  if (element == 2)
    linear::Product<linear::BFloat16>(problem).run();
  else
    linear::Product<linear::Float32>(problem).run();
  Py_END_ALLOW_THREADS;
  return out;
}

static PyMethodDef kMethod = {"linear", (PyCFunction)(void*)call, METH_FASTCALL, nullptr};

}  // namespace function

extern "C" {

// `data` is torch's function from a tensor to its memory, `empty` its own from sizes, strides and dtype to a tensor.
PyObject* linear_function(void* data, PyObject* operation, PyObject* empty, PyObject* float32, PyObject* bfloat16) {
  for (PyObject* object : {operation, empty, float32, bfloat16}) Py_INCREF(object);
  function::torch = {reinterpret_cast<void* (*)(PyObject*)>(data), operation, empty, float32, bfloat16};
  return PyCFunction_New(&function::kMethod, nullptr);
}
}
