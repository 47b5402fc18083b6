// Shared memory of the kernels with matrix units, and the barrier that orders its accesses.
//
// Cooperative matrices need the Vulkan memory model. In that model glslang gives every access of a `shared` variable
// MakePointerAvailable or MakePointerVisible: the access itself hands its value over, and compilers wait after each.
// The accesses below have NonPrivatePointer alone, and meet() hands over everything that they wrote:
//
//   * A write W and another invocation's access X of the same word always have a meet() between them in every
//     invocation of the workgroup. W is program-ordered before its invocation's meet(), which releases and makes
//     available, in workgroup scope, all non-private writes to shared memory. That release synchronizes with the
//     acquire of X's invocation, whose meet() makes them visible, and X is program-ordered after it. So W
//     happens-before X. Where X reads, W is visible to it; where X writes, W is available before.
//   * A read and a later write by another invocation have a meet() between them, too, and happen in that order.
//   * An invocation's own accesses of a word go through the same reference and are ordered by the program.
//
// meet() stands in control flow that is uniform in the workgroup.
void meet() {
    controlBarrier(gl_ScopeWorkgroup, gl_ScopeWorkgroup, gl_StorageSemanticsShared,
                   gl_SemanticsAcquireRelease | gl_SemanticsMakeAvailable | gl_SemanticsMakeVisible);
}

#define NON_PRIVATE 0x20  // the memory operand NonPrivatePointer: the model orders the access among invocations

// OpLoad and OpStore, and the same for a matrix that begins at `word`
spirv_instruction(id = 61) uint op_load(spirv_by_reference uint word, spirv_literal int operands);
spirv_instruction(id = 61) float op_load(spirv_by_reference float word, spirv_literal int operands);
spirv_instruction(id = 61) vec2 op_load(spirv_by_reference vec2 word, spirv_literal int operands);
spirv_instruction(id = 62) void op_store(spirv_by_reference uint word, uint x, spirv_literal int operands);
spirv_instruction(id = 62) void op_store(spirv_by_reference float word, float x, spirv_literal int operands);
spirv_instruction(id = 62) void op_store(spirv_by_reference vec2 word, vec2 x, spirv_literal int operands);
spirv_instruction(id = 4457)
MatrixA op_load_a(spirv_by_reference uint word, int major, uint pitch, spirv_literal int operands);
spirv_instruction(id = 4457)
MatrixB op_load_b(spirv_by_reference uint word, int major, uint pitch, spirv_literal int operands);
spirv_instruction(id = 4457)
MatrixC op_load_c(spirv_by_reference float word, int major, uint pitch, spirv_literal int operands);
spirv_instruction(id = 4458)
void op_store_c(spirv_by_reference uint word, MatrixC x, int major, uint pitch, spirv_literal int operands);

#define load(word) op_load(word, NON_PRIVATE)
#define store(word, x) op_store(word, x, NON_PRIVATE)
// A has its rows in memory one after another, B its columns: both lie along the dimension that a product sums over.
#define load_a(word, pitch) op_load_a(word, gl_CooperativeMatrixLayoutRowMajor, pitch, NON_PRIVATE)
#define load_b(word, pitch) op_load_b(word, gl_CooperativeMatrixLayoutColumnMajor, pitch, NON_PRIVATE)
// A row's number in every column: column-major, with all columns in the same place.
#define load_rows(word) op_load_c(word, gl_CooperativeMatrixLayoutColumnMajor, 0u, NON_PRIVATE)
// A column's number in every row.
#define load_columns(word) op_load_c(word, gl_CooperativeMatrixLayoutRowMajor, 0u, NON_PRIVATE)
#define store_c(word, x, pitch) op_store_c(word, x, gl_CooperativeMatrixLayoutRowMajor, pitch, NON_PRIVATE)
