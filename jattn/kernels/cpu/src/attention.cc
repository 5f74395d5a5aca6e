// Attention on CPUs, as XLA calls it: forward, backward, and statistics of weights.
//
// threads.h distributes a call (call.h) over threads; forward.h, backward.h and statistics.h compute
// one head by tiles, and block.h determines which keys a block of queries sees.
//
// A block of queries visits its tiles of keys with the online softmax (Milakov and Gimelshein
// 2018; Dao et al. 2022, FlashAttention, algorithms 1 and 4). A tile of scores fits the L1 cache and
// is transposed: rows are keys, and the lanes of a vector are queries. So the maximum, sum and bounds
// of the queries are vectors too, nothing is summed across a vector, and the only operand to be
// transposed is the block of queries (and of d_out):
//
//   scores   [s, t] = k [s, H] · qT [H, t]          d_weights [s, t] = v [s, V] · d_outT [V, t]
//   out      [t, V] += weightsT [t, s] · v [s, V]    d_query   [t, H] += d_scoresT [t, s] · k [s, H]
//   d_key    [s, H] += d_scores [s, t] · q [t, H]    d_value   [s, V] += weights [s, t] · d_out [t, V]
//
// A query sees the keys `start <= j < stop`, of these only keys with its id if there are ids. Empty
// tiles are skipped, and full tiles are not masked. Other masks and score functions are rules that
// are compiled separately (rule.h): they change a tile of scores in place, and a tile map tells which
// tiles are empty and which are full. Masked scores are replaced by -infinity; sums over keys or
// queries replace numbers that are not finite by 0, because a weight of 0 times NaN would be NaN.
//
// Other normalizers than the softmax are functions of one score (pointwise.h), which need no online
// softmax, or of all scores of a query (rows.h).

#include "threads.h"

namespace {

Index bytes_of(const Buffer& x) { return static_cast<Index>(ffi::ByteWidth(x.element_type())); }

// Finds the rule of a call, which was added when the program was lowered.
void find_rule(const Attributes& attributes, Call& call, ffi::RemainingArgs operands,
               ffi::RemainingRets* gradients = nullptr) {
  const int64_t number = attributes.rule;
  if (!number) return;
  call.own.rule = rule_of(number);
  if (auto* ask = ask_for_rule.load(); !call.own.rule && ask) {
    ask(number);
    call.own.rule = rule_of(number);
  }
  if (!call.own.rule)
    throw ffi::Error(
        ffi::ErrorCode::kFailedPrecondition,
        "jattn: this process has not compiled the functions of this program's masks and scores:"
        " call jattn.attention with them once before");
  call.own.row = attributes.row, call.own.chunk = attributes.chunk;
  for (size_t i = 0; i < operands.size(); ++i) {
    const auto x = operands.get<Buffer>(i);
    if (x.has_error()) throw x.error();
    call.own.operands.emplace_back(*x, call.B, 1, bytes_of(*x));
  }
  if (!gradients) return;
  for (size_t i = 0, next = 0; i + 1 < operands.size(); ++i) {
    call.own.gradients.push_back(nullptr), call.own.sizes.push_back(0);
    if (!(attributes.differentiated >> i & 1)) continue;
    auto x = gradients->get<Buffer>(next++);
    if (x.has_error()) throw x.error();
    call.own.gradients.back() = static_cast<char*>((*x)->untyped_data());
    call.own.sizes.back() = axis(**x, 1) * bytes_of(**x);
  }
}

void run_forward(ffi::ThreadPool pool, const Arrays& arrays, ffi::RemainingArgs operands, Out out,
                 Out most, Out log_sum, const Attributes& attributes) {
  Call call{arrays, attributes};
  find_rule(attributes, call, operands);
  forward_all(pool, call, outputs_of(out), heads_of(most, false), heads_of(log_sum, false),
              most->element_count() > 0);
}

void run_backward(ffi::ThreadPool pool, const Arrays& arrays, Buffer d_out, Buffer most,
                  Buffer log_sum, Buffer delta, ffi::RemainingArgs operands, Out d_q, Out d_k,
                  Out d_v, Out d_bias, ffi::RemainingRets gradients, const Attributes& attributes) {
  Call call{arrays, attributes};
  find_rule(attributes, call, operands, &gradients);
  T* sums = static_cast<T*>(d_bias->untyped_data());
  const Put how = put_of(d_q->element_count() + d_k->element_count() + d_v->element_count());
  const Gradients all{heads_of(d_out), heads_of(most, false), heads_of(log_sum, false),
                      heads_of(delta, false), heads_of(d_q), heads_of(d_k), heads_of(d_v), sums,
                      axis(*d_bias, 1), how};
  by_products(call, [&](auto products) {
    if (call.normalizer.by_rows()) return backward_all_by_rows<decltype(products)>(pool, call, all);
    backward_all<decltype(products)>(pool, call, all);
  });
}

void run_statistics(ffi::ThreadPool pool, const Arrays& arrays, Buffer maximum, Buffer log_total,
                    Buffer q_positions, Buffer kv_positions, Buffer marks,
                    ffi::RemainingArgs operands, Out entropy, Out greatest, Out place, Out distance,
                    Out on_keys, Out above, Out received, const Attributes& attributes) {
  Call call{arrays, attributes};
  find_rule(attributes, call, operands);
  statistics_all(pool, call,
                 {heads_of(maximum, false), heads_of(log_total, false), {q_positions, call.B},
                  {kv_positions, call.B}, {marks, call.B}, static_cast<T>(attributes.least),
                  heads_of(entropy, false), heads_of(greatest, false), heads_of(distance, false),
                  heads_of(on_keys, false), heads_of(above, false),
                  heads_of<int32_t>(*place, false), static_cast<T*>(received->untyped_data())});
}

// Returns a function as XLA calls it, with each of the arrays as an argument.
template <typename Run>
auto called(const Run& run) {
  return [run](ffi::ThreadPool pool, Buffer query, Buffer key, Buffer value, Buffer start,
               Buffer stop, Buffer q_ids, Buffer kv_ids, Buffer bias, Buffer seeds, auto... rest) {
    const Arrays arrays{query, key, value, start, stop, q_ids, kv_ids, bias, seeds};
    return reported([&] { run(pool, arrays, rest...); });
  };
}

}  // namespace

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    Attributes, StructMember<double>("scale"), StructMember<double>("cap"),
    StructMember<double>("dropout_scale"), StructMember<int64_t>("threshold"),
    StructMember<int64_t>("rule"), StructMember<int64_t>("row"), StructMember<int64_t>("chunk"),
    StructMember<int64_t>("differentiated"), StructMember<double>("least"),
    StructMember<int64_t>("normalizer"), StructMember<double>("constant"));

#define JATTN_ARRAYS                                                                          \
  xla::ffi::Ffi::Bind()                                                                       \
      .Ctx<xla::ffi::ThreadPool>()                                                            \
      .Arg<Buffer>().Arg<Buffer>().Arg<Buffer>().Arg<Buffer>().Arg<Buffer>().Arg<Buffer>()    \
      .Arg<Buffer>().Arg<Buffer>().Arg<Buffer>()

XLA_FFI_DEFINE_HANDLER_SYMBOL(jattn_forward, called(run_forward),
                              JATTN_ARRAYS.RemainingArgs()
                                  .Ret<Buffer>().Ret<Buffer>().Ret<Buffer>().Attrs<Attributes>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jattn_backward, called(run_backward),
                              JATTN_ARRAYS.Arg<Buffer>().Arg<Buffer>().Arg<Buffer>().Arg<Buffer>()
                                  .RemainingArgs().Ret<Buffer>().Ret<Buffer>().Ret<Buffer>()
                                  .Ret<Buffer>().RemainingRets().Attrs<Attributes>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jattn_statistics, called(run_statistics),
                              JATTN_ARRAYS.Arg<Buffer>().Arg<Buffer>().Arg<Buffer>().Arg<Buffer>()
                                  .Arg<Buffer>().RemainingArgs().Ret<Buffer>().Ret<Buffer>()
                                  .Ret<Buffer>().Ret<Buffer>().Ret<Buffer>().Ret<Buffer>()
                                  .Ret<Buffer>().Attrs<Attributes>());

// Sets the callback that adds a rule, given its number, if the process does not have it.
extern "C" void jattn_ask_for_rules(void (*ask)(int64_t)) { ask_for_rule = ask; }

// Adds a compiled rule, unless it was added before; its library stays loaded.
extern "C" void jattn_add_rule(int64_t number, void* forward, void* backward, int modifies,
                               int keeps) {
  if (rule_of(number)) return;
  auto* rule = new Generated{reinterpret_cast<void (*)(const Place&, T*, bool)>(forward),
                             reinterpret_cast<void (*)(const Place&, const T*, T*)>(backward),
                             modifies != 0, keeps != 0, number, rules_like(number)};
  while (!rules_like(number).compare_exchange_weak(rule->next, rule)) {
  }
}
