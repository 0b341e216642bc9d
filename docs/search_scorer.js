// Functions of neula come first in a search, then the pages of the guide, and building blocks last.
var Scorer = {
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
  score: ([docname, title, anchor, descr, score]) => {
    if (/^#neula\.\w+$/.test(anchor)) return score + 60;
    return docname.includes("/") ? score - 40 : score;
  },
};
