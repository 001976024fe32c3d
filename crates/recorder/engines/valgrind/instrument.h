/* The instrumentation of basic blocks: gathers accesses into groups, and emits a test and a stamp for each
   group. Part of the translation unit of pagetax.c.

   This file: Copyright the pagetax authors. SPDX-License-Identifier: GPL-2.0-or-later OR MIT OR
   Apache-2.0. Linked with Valgrind's core, which is GPL-2.0-or-later: see NOTICE. */

/* A temporary of the program as the sum of another one and a constant; constants have no root. */
typedef struct {
   IRTemp root;
   Long offset;
   Addr now; /* its value while the block is translated; 0: unknown */
} Place;

/* Accesses near each other, in a block under construction. */
typedef struct {
   Bool fetch;
   IRTemp root;
   Long low, high; /* the offsets of its first byte and of the byte after its last */
   IRExpr *lowest; /* the address at low */
   UInt tick;      /* of its last access */
} Run;

/* A block under construction. */
typedef struct {
   IRSB *out;
   Place *places; /* by temporary */
   UInt run_count, unknown_count, access_count;
   Run runs[GROUP];
   Access accesses[ACCESSES];
   Long offsets[ACCESSES];
   Addr where[ACCESSES]; /* the instruction of each */
   ThreadId thread;
   IRExpr *began;            /* the clock when the block began */
   ULong added;              /* to the clock since then */
   UInt instructions, ticks; /* and what is not yet added: instructions and accesses */
   Addr instruction;
   Addr code_page; /* of the fetch tested last; 1: none */
   Int known_at;   /* the statement before which all addresses of the group are known */
} Block;

#define SLOT_SHIFT 4 /* log2 of sizeof(struct pt_slot) */

static IRExpr *word(ULong value) { return IRExpr_Const(IRConst_U64(value)); }

static IRExpr *assign(IRSB *out, IRType type, IRExpr *value)
{
   IRTemp temp = newIRTemp(out->tyenv, type);
   addStmtToIRSB(out, IRStmt_WrTmp(temp, value));
   return IRExpr_RdTmp(temp);
}

static IRExpr *binop(IRSB *out, IROp op, IRExpr *a, IRExpr *b)
{
   return assign(out, Ity_I64, IRExpr_Binop(op, a, b));
}

static IRExpr *shift_right(IRSB *out, IRExpr *value, UInt by)
{
   return by == 0 ? value : binop(out, Iop_Shr64, value, IRExpr_Const(IRConst_U8(by)));
}

/* Returns the slot of an address: an offset into its table or, for a constant, its address. */
static IRExpr *slot_of(IRSB *out, const struct pt_filter *filter, struct pt_table *table,
                       IRExpr *address)
{
   if (address->tag == Iex_Const)
      return word((ULong)pt_slot(filter, table, address->Iex.Const.con->Ico.U64));
   IRExpr *scaled = shift_right(out, address, filter->page_shift - SLOT_SHIFT);
   return binop(out, Iop_And64, scaled, word((PT_SLOTS - 1) << SLOT_SHIFT));
}

/* Returns the address of a part of a slot, a new expression at each use, so that it folds into the use. */
static IRExpr *part_of(IRSB *out, IRExpr *slot, struct pt_table *table, UInt part)
{
   if (slot->tag == Iex_Const)
      return word(slot->Iex.Const.con->Ico.U64 + part);
   return binop(out, Iop_Add64, slot, word((ULong)table->slots + part));
}

/* Returns the bits in which the address and the page in its slot differ. */
static IRExpr *difference(IRSB *out, IRExpr *address, IRExpr *slot, struct pt_table *table)
{
   IRExpr *page = assign(out, Ity_I64,
                         IRExpr_Load(Iend_LE, Ity_I64,
                                     part_of(out, slot, table, offsetof(struct pt_slot, page))));
   return binop(out, Iop_Xor64, address, page);
}

static void stamp(IRSB *out, const struct pt_filter *filter, IRExpr *slot, struct pt_table *table,
                  IRExpr *time)
{
   if (filter->ways < 2)
      return; /* one page has no order */
   IRExpr *at = part_of(out, slot, table, offsetof(struct pt_slot, stamp));
   addStmtToIRSB(out, IRStmt_Store(Iend_LE, at, time));
}

static const struct pt_side *side_of(const Run *run)
{
   return run->fetch ? &code_side : &data_side;
}

static struct pt_tables *tables_of(const Run *run)
{
   return run->fetch ? &code_tables : &data_tables;
}

/* Returns a test: bits from small.page_shift on are set if a page of the run is not in its slot. */
static IRExpr *test_of(IRSB *out, const Run *run, IRExpr *slots[2])
{
   const struct pt_side *side = side_of(run);
   struct pt_tables *tables = tables_of(run);
   IRExpr *address = run->lowest;
   UInt shift = side->small.page_shift;
   ULong beyond = run->high - run->low - 1;
   if (address->tag == Iex_Const) {
      ULong first = address->Iex.Const.con->Ico.U64;
      /* If the run is on one page, it needs no addition. */
      if (first >> shift == (first + beyond) >> shift) {
         address = word(first >> shift << shift);
         beyond = 0;
      }
   }
   slots[0] = slot_of(out, &side->small, &tables->small, address);
   IRExpr *test = difference(out, address, slots[0], &tables->small);
   if (beyond)
      test = binop(out, Iop_Add64, test, word(beyond));
   if (side->large.ways) {
      slots[1] = slot_of(out, &side->large, &tables->large, address);
      IRExpr *large = difference(out, address, slots[1], &tables->large);
      test = binop(out, Iop_Or64, test, shift_right(out, large, side->large.page_shift - shift));
   }
   return test;
}

/* Emits a call of C for the group, under a guard. */
static void call_group(Block *block, IRExpr *guard)
{
   UInt count = block->access_count;
   Group *group =
      VG_(malloc)("pagetax.group", sizeof(Group) + count * (sizeof(Access) + sizeof(Addr)));
   Addr *instructions = (Addr *)&group->accesses[count];
   IRExpr *a[UNKNOWN], **args, *descriptor = mkIRExpr_HWord((HWord)group);
   UInt i, to, unknown = 0, known = block->unknown_count, number[GROUP];
   group->count = count;
   group->instructions = instructions;
   group->run_count = block->run_count;
   for (i = 0; i < group->run_count; i++) {
      const Run *run = &block->runs[i];
      Bool is_known = run->lowest->tag == Iex_Const;
      to = number[i] = is_known ? known++ : unknown++;
      group->runs[to] = (Extent){.fetch = run->fetch,
                                 .beyond = run->high - run->low - 1,
                                 .tick = run->tick,
                                 .lowest = is_known ? run->lowest->Iex.Const.con->Ico.U64 : 0};
      if (!is_known)
         a[to] = run->lowest;
   }
   for (i = 0; i < count; i++) {
      UInt run = block->accesses[i].run;
      instructions[i] = block->where[i];
      group->accesses[i] = block->accesses[i];
      group->accesses[i].run = number[run];
      group->accesses[i].offset = block->offsets[i] - block->runs[run].low;
   }
   switch (unknown) {
   case 0: args = mkIRExprVec_1(descriptor); break;
   case 1: args = mkIRExprVec_2(descriptor, a[0]); break;
   case 2: args = mkIRExprVec_3(descriptor, a[0], a[1]); break;
   case 3: args = mkIRExprVec_4(descriptor, a[0], a[1], a[2]); break;
   case 4: args = mkIRExprVec_5(descriptor, a[0], a[1], a[2], a[3]); break;
   default: args = mkIRExprVec_6(descriptor, a[0], a[1], a[2], a[3], a[4]); break;
   }
   IRDirty *call = unsafeIRDirty_0_N(0, group_calls[unknown].name,
                                     VG_(fnptr_to_fnentry)(group_calls[unknown].function), args);
   call->guard = guard;
   addStmtToIRSB(block->out, IRStmt_Dirty(call));
   block->run_count = block->unknown_count = block->access_count = 0;
}

/* Returns the clock plus a number. */
static IRExpr *time_of(Block *block, ULong sum)
{
   if (!block->began)
      block->began =
         assign(block->out, Ity_I64, IRExpr_Load(Iend_LE, Ity_I64, word((ULong)&counted)));
   sum += block->added;
   return sum ? binop(block->out, Iop_Add64, block->began, word(sum)) : block->began;
}

static void reverse(IRStmt **first, IRStmt **end)
{
   for (; first < --end; first++) {
      IRStmt *other = *first;
      *first = *end;
      *end = other;
   }
}

/* Moves the statements from `from` on before those from `to` on. */
static void move_before(IRSB *out, Int to, Int from)
{
   reverse(out->stmts + to, out->stmts + from);
   reverse(out->stmts + from, out->stmts + out->stmts_used);
   reverse(out->stmts + to, out->stmts + out->stmts_used);
}

/* Orders runs by their last access: if two are on one page, the later one must stamp it last. */
static void put_in_order(const Run *runs, UInt count, UInt *order)
{
   UInt i, to;
   for (i = 0; i < count; i++) {
      for (to = i; to > 0 && runs[order[to - 1]].tick > runs[i].tick; to--)
         order[to] = order[to - 1];
      order[to] = i;
   }
}

/* Ends the group: emits its test, the call and its stamps, as early as the addresses are known. */
static void end_group(Block *block)
{
   IRSB *out = block->out;
   Int end = out->stmts_used;
   IRExpr *slots[GROUP][2], *test = NULL;
   UInt i, order[GROUP];
   if (block->run_count == 0)
      return;
   for (i = 0; i < block->run_count; i++) {
      IRExpr *one = test_of(out, &block->runs[i], slots[i]);
      test = test ? binop(out, Iop_Or64, test, one) : one;
   }
   if (header->sample)
      test = binop(out, Iop_And64, test,
                   assign(out, Ity_I64,
                          IRExpr_Load(Iend_LE, Ity_I64, word((ULong)&recording))));
   test = shift_right(out, test, data_side.small.page_shift);
   UInt count = block->run_count;
   call_group(block, assign(out, Ity_I1, IRExpr_Unop(Iop_CmpNEZ64, test)));
   put_in_order(block->runs, count, order);
   for (i = 0; i < count; i++) {
      const Run *run = &block->runs[order[i]];
      IRExpr *time = time_of(block, clock_of(run->fetch, run->tick));
      stamp(out, &side_of(run)->small, slots[order[i]][0], &tables_of(run)->small, time);
      stamp(out, &side_of(run)->large, slots[order[i]][1], &tables_of(run)->large, time);
   }
   move_before(out, block->known_at, end);
}

/* Returns the root and the offset of an address. */
static Place place_of(const Block *block, const IRExpr *address)
{
   if (address->tag == Iex_Const)
      return (Place){.root = IRTemp_INVALID, .offset = address->Iex.Const.con->Ico.U64};
   return block->places[address->Iex.RdTmp.tmp];
}

/* Notes a temporary that is the sum of another one and a constant. */
static void note_place(Block *block, IRTemp temp, const IRExpr *value)
{
   if (value->tag == Iex_RdTmp)
      block->places[temp] = place_of(block, value);
   if (value->tag == Iex_Get && value->Iex.Get.ty == Ity_I64)
      VG_(get_shadow_regs_area)(block->thread, (UChar *)&block->places[temp].now, 0,
                                value->Iex.Get.offset, sizeof(Addr));
   if (value->tag != Iex_Binop || value->Iex.Binop.arg1->tag != Iex_RdTmp ||
       value->Iex.Binop.arg2->tag != Iex_Const)
      return;
   IROp op = value->Iex.Binop.op;
   if (op == Iop_Add64 || op == Iop_Sub64) {
      Long by = value->Iex.Binop.arg2->Iex.Const.con->Ico.U64;
      block->places[temp] = place_of(block, value->Iex.Binop.arg1);
      block->places[temp].offset += op == Iop_Add64 ? by : -by;
   }
}

/* Returns true if a run can grow by an access: it stays short and, as far as is known, on one page. */
static Bool fits(const Run *run, Bool fetch, Place place, UInt size)
{
   Long low = run->low < place.offset ? run->low : place.offset;
   Long high = place.offset + size > run->high ? place.offset + size : run->high;
   UInt shift = data_side.small.page_shift;
   if (run->fetch != fetch || run->root != place.root)
      return False;
   if (place.root != IRTemp_INVALID && (high - low > SPAN || !place.now))
      return high - low <= SPAN;
   return (place.now + low) >> shift == (place.now + high - 1) >> shift;
}

/* Returns the run that an access belongs to, or a new one at its address. */
static Run *run_of(Block *block, Bool fetch, IRExpr *address, UInt size)
{
   Place place = place_of(block, address);
   Bool known = address->tag == Iex_Const;
   UInt i;
   for (i = 0; i < block->run_count; i++)
      if (fits(&block->runs[i], fetch, place, size))
         break;
   Run *run = &block->runs[i];
   if (i == block->run_count) {
      if (i == GROUP || (!known && block->unknown_count == UNKNOWN)) {
         end_group(block);
         run = &block->runs[0];
      }
      *run = (Run){fetch, place.root, place.offset, place.offset + size, address, 0};
      block->run_count++;
      block->unknown_count += !known;
      block->known_at = block->out->stmts_used;
   }
   if (place.offset < run->low) {
      run->low = place.offset;
      run->lowest = address;
      block->known_at = block->out->stmts_used;
   }
   if (place.offset + size > run->high)
      run->high = place.offset + size;
   return run;
}

/* Adds an access to the group. The temporaries of its address are known by now. */
static void add_access(Block *block, UInt kind, IRExpr *address, UInt size, UInt tick)
{
   if (block->access_count == ACCESSES)
      end_group(block);
   Run *run = run_of(block, kind == PT_FETCH, address, size);
   UInt nth = block->access_count++;
   run->tick = tick;
   block->offsets[nth] = place_of(block, address).offset;
   block->where[nth] =
      kind == PT_FETCH ? address->Iex.Const.con->Ico.U64 : block->instruction;
   block->accesses[nth] =
      (Access){.tick = tick, .size = size, .run = run - block->runs, .kind = kind};
}

static void add_data(Block *block, UInt kind, IRExpr *address, UInt size)
{
   add_access(block, kind, address, size, ++block->ticks);
}

static void add_fetch(Block *block, Addr address)
{
   add_access(block, PT_FETCH, word(address), 1, block->instructions - 1);
}

/* Adds an access under a guard, which is too rare for a test in code. */
static void add_guarded(Block *block, UInt kind, IRExpr *address, UInt size, IRExpr *guard)
{
   end_group(block);
   add_data(block, kind, address, size);
   call_group(block, guard);
}

/* Adds the counts so far to the clock, before each exit. */
static void add_counts(Block *block)
{
   ULong sum = (ULong)block->instructions << 32 | block->ticks;
   if (sum == 0)
      return;
   IRExpr *now = time_of(block, sum);
   addStmtToIRSB(block->out, IRStmt_Store(Iend_LE, word((ULong)&counted), now));
   block->added += sum;
   block->instructions = block->ticks = 0;
}

/* Begins an instruction. Adds a fetch if it is on another page than the previous one, or on two pages. */
static void add_instruction(Block *block, Addr address, UInt length)
{
   UInt shift = code_side.small.page_shift;
   Addr last = address + (length ? length - 1 : 0);
   block->instruction = address;
   block->instructions++;
   if (block->code_page != address >> shift)
      add_fetch(block, address);
   if (last >> shift != address >> shift)
      add_fetch(block, last >> shift << shift);
   block->code_page = last >> shift;
}

static UInt size_of(const Block *block, const IRExpr *value)
{
   return sizeofIRType(typeOfIRExpr(block->out->tyenv, value));
}

static void add_load_guarded(Block *block, const IRLoadG *load)
{
   IRType type = Ity_INVALID, wide = Ity_INVALID;
   typeOfIRLoadGOp(load->cvt, &wide, &type);
   add_guarded(block, PT_LOAD, load->addr, sizeofIRType(type), load->guard);
}

static void add_dirty(Block *block, const IRDirty *dirty)
{
   if (dirty->mFx == Ifx_None)
      return;
   if (dirty->mFx != Ifx_Write)
      add_guarded(block, PT_LOAD, dirty->mAddr, dirty->mSize, dirty->guard);
   if (dirty->mFx != Ifx_Read)
      add_guarded(block, PT_STORE, dirty->mAddr, dirty->mSize, dirty->guard);
}

static void add_cas(Block *block, const IRCAS *cas)
{
   UInt size = size_of(block, cas->dataLo) * (cas->dataHi ? 2 : 1);
   add_data(block, PT_LOAD, cas->addr, size);
   add_data(block, PT_STORE, cas->addr, size);
}

/* Instruments a statement of the program. The caller adds the statement itself afterwards. */
static void instrument_statement(Block *block, IRStmt *st)
{
   switch (st->tag) {
   case Ist_IMark:
      add_instruction(block, st->Ist.IMark.addr, st->Ist.IMark.len);
      break;
   case Ist_WrTmp:
      note_place(block, st->Ist.WrTmp.tmp, st->Ist.WrTmp.data);
      if (st->Ist.WrTmp.data->tag == Iex_Load)
         add_data(block, PT_LOAD, st->Ist.WrTmp.data->Iex.Load.addr,
                  sizeofIRType(st->Ist.WrTmp.data->Iex.Load.ty));
      break;
   case Ist_Store:
      add_data(block, PT_STORE, st->Ist.Store.addr, size_of(block, st->Ist.Store.data));
      break;
   case Ist_LoadG:
      add_load_guarded(block, st->Ist.LoadG.details);
      break;
   case Ist_StoreG:
      add_guarded(block, PT_STORE, st->Ist.StoreG.details->addr,
                  size_of(block, st->Ist.StoreG.details->data), st->Ist.StoreG.details->guard);
      break;
   case Ist_Dirty:
      add_dirty(block, st->Ist.Dirty.details);
      break;
   case Ist_CAS:
      add_cas(block, st->Ist.CAS.details);
      break;
   case Ist_LLSC:
      add_data(block, st->Ist.LLSC.storedata ? PT_STORE : PT_LOAD, st->Ist.LLSC.addr,
               st->Ist.LLSC.storedata
                  ? size_of(block, st->Ist.LLSC.storedata)
                  : sizeofIRType(typeOfIRTemp(block->out->tyenv, st->Ist.LLSC.result)));
      break;
   case Ist_Exit:
      end_group(block);
      add_counts(block);
      break;
   default:
      break;
   }
}

static IRSB *instrument(VgCallbackClosure *closure, IRSB *in, const VexGuestLayout *layout,
                        const VexGuestExtents *extents, const VexArchInfo *host, IRType guest_word,
                        IRType host_word)
{
   Block block = {
      .out = deepCopyIRSBExceptStmts(in), .code_page = 1, .thread = closure->tid};
   Int i, temps = in->tyenv->types_used;
   block.places = VG_(malloc)("pagetax.places", (temps + 1) * sizeof(Place));
   for (i = 0; i < temps; i++)
      block.places[i] = (Place){.root = i};
   i = 0;
   /* Statements before the first instruction are no accesses of the program. */
   for (; i < in->stmts_used && in->stmts[i]->tag != Ist_IMark; i++)
      addStmtToIRSB(block.out, in->stmts[i]);
   for (; i < in->stmts_used; i++) {
      instrument_statement(&block, in->stmts[i]);
      addStmtToIRSB(block.out, in->stmts[i]);
   }
   end_group(&block);
   add_counts(&block);
   VG_(free)(block.places);
   return block.out;
}
