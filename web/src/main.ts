import { showTips } from "./charts/tooltip";
import { embedded } from "./documents";
import { showPage } from "./page";
import "./style.css";

showPage(await embedded(document));
showTips();
